"""Drafters: who guesses the next tokens, and how far. A guess costs time when it is wrong and never changes an answer.

``base`` is the contract. Who guesses:

    prediction   what the client says the answer will be
    suffix       what followed the last time the text looked like this (suffix_index), or a tenant's earlier (history)
    model        a draft model in the target's pages (model_rows): an ``independent`` one, or an ``eagle3`` head
    hybrid       all of these, for each sequence the one that promises most

``controller`` decides, every step, how many tokens each sequence drafts: by what they cost (controller_costs), how
often guesses came true (calibration, controller_records), and what chains of a draft model gained
(controller_chains). ``speculators`` is the format of drafts on disk, ``drafts`` holds those that come with Outrider
(shipped), and ``distill`` makes new ones.
"""
