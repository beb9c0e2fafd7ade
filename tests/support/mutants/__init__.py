"""Mutation testing: small faults, of the kinds that cosmic-ray knows, of which the tests must notice nearly all."""
