"""Distillation with our own engine: ``continuations`` generates, ``validation`` measures, ``run`` does all of a run."""
