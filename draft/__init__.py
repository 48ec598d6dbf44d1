"""Drafters: who guesses the next tokens. A guess costs time when it is wrong and never changes an answer.

``base`` is the contract; ``suffix`` finds the longest suffix of a sequence that occurred in it before, and
proposes what followed there.
"""
