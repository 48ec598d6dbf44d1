"""Sampling parameters that are out of range: the message speaks of the fields and values that were sent."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.server.engine.request import ModelInfo
from outrider.server.protocol.errors import ProtocolError
from outrider.server.protocol.fields import Fields
from outrider.server.protocol.sampling import parse_sampling

MODEL = ModelInfo("m", vocab_size=100, max_context=64, kernels="reference", drafter="none", max_draft_tokens=0)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"min_output_tokens": 9, "max_output_tokens": 4},
            "min_output_tokens",
            "'min_output_tokens' must be from 0 to 'max_output_tokens', not 9.",
        ),
        ({"stop": ["ok", ""]}, "stop", "'stop' must hold strings of 1 to 1024 characters; one has 0."),
        ({"stop": ["x"] * 40}, "stop", "'stop' must be at most 16 strings, not 40."),
        ({"logit_bias": {"5": 1e9}}, "logit_bias", "from -100 to 100, not 1000000000.0 for token 5."),
        ({"logit_bias": {"100": 1}}, "logit_bias", "'logit_bias' names token 100; this model has tokens 0 to 99."),
    ],
)
def test_a_value_out_of_range_is_named_in_the_clients_words(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_sampling(Fields(fields), MODEL, seed=0, logprobs=False)
    assert refused.value.param == param
    assert message in refused.value.message
