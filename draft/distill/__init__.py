"""The training of a draft for a given target, on nothing but the target's own words.

``settings`` says what is to be made, ``directory`` is where a run keeps what it has, so that it can go on, and
``distillation`` does what is left of it, phase by phase.
``chat_frame``, ``openings`` and ``conversations`` let the target write dialogues with itself; ``continuation`` is
the contract of who generates, ``generation`` drives it and ``corpus`` keeps what came out. ``dense_target`` computes
the target's features again, batch by batch; ``head`` is the draft as it is trained, ``least_squares`` where it begins,
``unrolled`` what it is trained for; ``batches`` and ``trainer`` do it, and ``training_state`` survives a kill.
``export`` writes the draft, ``card`` tells about it, ``progress`` while it is made.
"""
