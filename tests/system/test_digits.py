"""The claim of the first run: on the shipped digits personal models by self-distillation beat the shared one."""

import statistics

import fedstill as fs
from fedstill.run.prepare import federation_of


def test_pfedsd_beats_fedavg_on_the_digits() -> None:
    """Three seeds, each its own partition and weights; the margin is what the seeds' spread leaves certain.

    Student's t with two degrees of freedom: the mean difference less 2.92 standard errors is a lower bound at 95 %.
    """
    gains = []
    for seed in range(3):
        fed = federation_of(fs.Experiment(seed=seed))
        personal, shared = (
            fs.run(fs.Experiment(method=method, seed=seed, eval_every=30), federation=fed).score()
            for method in (fs.PFedSD(), fs.FedAvg())
        )
        gains.append(personal - shared)
    margin = statistics.mean(gains) - 2.92 * statistics.stdev(gains) / 3**0.5
    assert margin > 0, gains


def test_personal_is_not_the_generic_model() -> None:
    """The trap of the field: personal accuracies that are really the global model's."""
    run = fs.run(fs.Experiment(method=fs.PFedSD(), rounds=3, eval_every=3))
    assert run.history[-1]["personal_clients"] != run.history[-1]["generic_clients"]
    fed = federation_of(fs.Experiment())
    from fedstill import models

    for k in (0, 7):
        net = models.build("mlp", fed.shape, fed.classes)
        net.load_state_dict(run.personal(k))
        client = fed.clients[k]
        rate = (net.eval()(client.x_test).argmax(-1) == client.y_test).double().mean().item()
        assert abs(rate - run.history[-1]["personal_clients"][str(k)]) < 1e-9
