"""Models with one number per token: the heads that are refused."""

import pytest
from transformers import BertConfig, BertForSequenceClassification

from headway.errors import InputError
from learner.model.scalar_model import load_scalar_model


def test_a_head_under_another_name_is_refused_with_its_type_and_shape(tmp_path):
    config = BertConfig(
        vocab_size=8,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=4,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    message = r"must be a Linear `score` with one output, found .*: Linear\(in_features=4, out"
    with pytest.raises(InputError, match=message):
        load_scalar_model(str(tmp_path), dtype="float32", attention="sdpa", seed=0)
