"""The paged KV cache: who owns which page, what is in it, and who may read it again.

``storage`` holds the tensors, ``pool`` counts the pages, ``prefix_index`` finds published pages by their
tokens, ``sequence`` ties the three together for one sequence. A page is always in exactly one state:

    free ──allocate──▶ referenced ──last release, published──▶ reusable
     ▲                  │     ▲                                 │   │
     └──last release,───┘     └────────acquire (prefix hit)─────┘   │
     │  not published                                               │
     └◀───────────────────────evict, least recently used────────────┘

A sequence's positions, and what they are:

    0                   num_cached_tokens                 len(page_table) * page_size
    ├───────┬───────┬────────┼───────┬───────────────────────┤
    │ verified: read only    │ reserved: drafts live and die here
    │ full pages are published
"""
