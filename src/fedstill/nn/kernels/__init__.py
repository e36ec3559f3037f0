"""Convolutions that are faster than torch's for stacked or small models, each tested against torch's."""
