"""The rules: what must be true of a competition, a round, a recipe, a metric and a ranking. Pure, no I/O beyond bytes."""
