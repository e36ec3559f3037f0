"""Convolutions that are faster than torch's own for stacked or small models, each tested against torch's."""
