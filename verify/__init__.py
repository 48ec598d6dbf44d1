"""The target model: its checkpoint, its transformer, and the judgement on drafted tokens.

``transformer`` turns rows into logits, ``sampler`` turns logits into tokens: ``logits`` applies penalties and
bans, ``distribution`` temperature and truncation, ``acceptance`` decides which drafts stand.
"""
