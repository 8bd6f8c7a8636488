"""Write the library of counts: `python -m executor.library profiles [NAME ...]`, a file for each model and type.

The models are those of the published configurations; --model of `harmony-planner what-if` takes their names.
"""

from __future__ import annotations

import sys
from pathlib import Path

from executor.count import count
from planner.contract import store

DTYPES = ("bfloat16", "float32")


def _gpt2(layers: int, width: int, heads: int) -> str:
    return (
        f"hf:gpt2?n_layer={layers}&n_embd={width}&n_head={heads}&vocab_size=50257&n_positions=1024&seq=1024"
    )


def _llama(
    layers: int, width: int, inner: int, heads: int, groups: int, words: int, *, tied: bool = False
) -> str:
    return (
        f"hf:llama?num_hidden_layers={layers}&hidden_size={width}&intermediate_size={inner}&num_attention_heads={heads}"
        f"&num_key_value_heads={groups}&vocab_size={words}&tie_word_embeddings={str(tied).lower()}"
        f"&max_position_embeddings=4096&seq=2048"
    )


SPECS = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-1b": _llama(16, 2048, 8192, 32, 8, 128256, tied=True),
    "llama-3b": _llama(28, 3072, 8192, 24, 8, 128256, tied=True),
    "llama-8b": _llama(32, 4096, 14336, 32, 8, 128256),
    "llama-13b": _llama(40, 5120, 13824, 40, 40, 32000),
    "llama-70b": _llama(80, 8192, 28672, 64, 8, 128256),
    "bert-large": "hf:bert?num_hidden_layers=24&hidden_size=1024&intermediate_size=4096&num_attention_heads=16"
    "&vocab_size=30522&seq=512&task=pretraining",
    "t5-large": "hf:t5?num_layers=24&d_model=1024&d_kv=64&d_ff=4096&num_heads=16&vocab_size=32128&seq=512",
    "vit-large": "hf:vit?num_hidden_layers=24&hidden_size=1024&intermediate_size=4096&num_attention_heads=16"
    "&image_size=224&patch_size=16&num_labels=1000",
    "resnet-152": "hf:resnet?depths=3,8,36,3&hidden_sizes=256,512,1024,2048&embedding_size=64"
    "&layer_type=bottleneck&image=224&num_labels=1000",
}


def main() -> None:
    """Write the files, all of them or those named."""
    folder, *names = sys.argv[1:]
    for name in names or SPECS:
        for dtype in DTYPES:
            path = Path(folder, f"{name}.{dtype}.json")
            counts = count(
                SPECS[name],
                optimizer="adamw",
                settings={"lr": 1e-3, "weight_decay": 0.01},
                dtype="" if dtype == "float32" else dtype,
            )
            store.save(counts, path)
            sys.stderr.write(f"{path}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
