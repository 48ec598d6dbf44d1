"""``outrider bench``: what a client sees of a server, measured from outside.

``prompts`` reads the workload, ``streams`` speaks the wire protocols, ``contenders`` are what is measured,
``rounds`` lets them take turns, ``measures`` turns records into numbers, ``report`` and ``plot`` show them.
``own_server`` starts servers to be compared, ``speculation`` and ``categories`` sum what drafts came to,
``drafts_report`` shows that.
"""
