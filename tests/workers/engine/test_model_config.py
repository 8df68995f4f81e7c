"""config.json as transformers writes it, and the tokenizer of models without one; neither needs PyTorch."""

import json

import pytest

from controller.core.errors import ConfigError
from workers.engine.config import parse
from workers.engine.model_config import Rope, parse_config
from workers.engine.text.model_tokenizer import ByteTokenizer, FileDecoder, model_tokenizer

LLAMA_8B = {  # Llama-3.1-8B's published shape
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "eos_token_id": [128001, 128008],
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip


def test_a_published_config_is_understood():
    config = parse_config(LLAMA_8B)
    assert (config.head_dim, config.kv_heads, config.dtype) == (128, 8, "bfloat16")
    assert config.rope == Rope(500000.0, 8.0, 1.0, 4.0, 8192)
    assert config.eos == {128001, 128008}
    assert config.kv_bytes_per_token(2) == 131072
    assert config.experts is None


def test_the_newer_layout_says_the_same():
    newer = {key: value for key, value in LLAMA_8B.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    newer |= {"dtype": "bfloat16", "rope_parameters": {**LLAMA_8B["rope_scaling"], "rope_theta": 500000.0}}
    assert parse_config(newer) == parse_config(LLAMA_8B)


def test_the_generation_config_knows_the_end_better():
    assert parse_config(LLAMA_8B, {"eos_token_id": 7}).eos == {7}


def test_experts_of_both_layouts():
    mixtral = {**LLAMA_8B, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    assert parse_config(mixtral).experts.size == 14336
    qwen = {**LLAMA_8B, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "norm_topk_prob": True}  # fmt: skip
    found = parse_config(qwen)
    assert (found.experts.count, found.experts.top, found.experts.size) == (128, 8, 768)
    assert found.qk_norm


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama3 needs factor"),
        ({"torch_dtype": "float8"}, "dtype"),
        ({"architectures": ["MixtralForCausalLM"]}, "num_local_experts"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok: 3 of 2",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_its_key(change, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_config({**LLAMA_8B, **change})
    assert caught.value.field == "model"


def test_the_cache_is_as_large_as_asked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = parse(["--port", "1", "--executor", "torch", "--model", str(tmp_path), "--kv-cache-gib", "2"])
    assert config.engine.kv_blocks == 2**31 // (131072 * 16)
    assert config.engine.max_model_len == 8192
    assert config.model == tmp_path.name
    named = parse(
        [
            "--port",
            "1",
            "--executor",
            "torch",
            "--model",
            str(tmp_path),
            "--served-model-name",
            "llama",
            "--dtype",
            "float32",
        ]
    )
    assert (named.model, named.engine.kv_blocks) == ("llama", 2**30 // (2 * 131072 * 16))


def test_a_broken_config_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SystemExit):
        parse(["--port", "1", "--executor", "torch", "--model", str(tmp_path)])
    assert f"--model: {tmp_path / 'config.json'}: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["plain", "naïve café 日本 🙂", ""])
def test_bytes_survive_the_round_trip(text):
    tokenizer = ByteTokenizer(300)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.estimate(text) <= len(ids)
    decoder = tokenizer.decoder()
    assert "".join(decoder.feed(token, index == len(ids) - 1) for index, token in enumerate(ids)) == text


def test_ids_without_text_are_shown():
    assert ByteTokenizer(300).decode([72, 299, 105]) == "H<299>i"


def test_a_small_vocabulary_needs_a_tokenizer(tmp_path):
    with pytest.raises(ConfigError, match="at least 256"):
        model_tokenizer(tmp_path, 100)


def test_bytes_that_are_no_character_break_off_no_answer():
    """With byte fallback a model may sample the first byte of a character and then a word."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, "<0x0A>": 1, "<0xE2>": 2, "\u2581the": 3, "<0x82>": 4, "<0xAC>": 5}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    made.decoder = tokenizers.decoders.Sequence(steps)
    decoder = FileDecoder(made)
    text = "".join(decoder.feed(token) for token in (1, 2, 3, 3, 2, 4, 5, 3))
    assert text == "\n\ufffd the the\u20ac the"
    assert (decoder.feed(2), decoder.rest(), decoder.rest()) == ("", "\ufffd", "")
