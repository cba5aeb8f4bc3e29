"""Transformers and diffusers: text, sound, images and time series, in the smallest configurations that are whole."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Batch, Entry
from .torchvision_ops import import_library

WORDS = 128
"""Of every vocabulary."""
LENGTH = 24

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER = {**TINY, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
ENCODER_DECODER = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
TINY_GPT2 = {
    "vocab_size": WORDS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_T5 = {
    "vocab_size": WORDS,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SOUNDS = 16
TINY_WHISPER = {
    **ENCODER_DECODER,
    "vocab_size": WORDS,
    "num_mel_bins": SOUNDS,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
PIXELS = {"image_size": 32, "patch_size": 8}
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, **PIXELS}


def hugging_face(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers by the names of its class and of its configuration's."""

    def make() -> nn.Module:
        library = import_library("transformers")
        built: nn.Module = getattr(library, model)(getattr(library, config)(**options))
        return built

    return make


def text(size: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Sentences of different lengths, each padded at its end."""
    ids = torch.randint(3, WORDS, (size, length))
    mask = torch.ones_like(ids)
    for i in range(size):
        mask[i, length - i % 4 * 2 :] = 0
    mask[0, -1] = 0  # some padding in every batch: a mask that hides nothing is dropped
    return {"input_ids": ids * mask, "attention_mask": mask}


def _start(size: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Prompts of one length."""
    return {"input_ids": torch.randint(3, WORDS, (size, length))}


def _pairs(size: int) -> dict[str, Tensor]:
    return {**text(size), "decoder_input_ids": torch.randint(3, WORDS, (size, 8))}


def _pixels(side: int = 32) -> Callable[[int], dict[str, Tensor]]:
    return lambda size: {"pixel_values": torch.randn(size, 3, side, side)}


def _sound(length: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda size: {"input_values": torch.randn(size, length)}


def _cached(ids: str = "input_ids") -> Callable[[nn.Module, Batch], Any]:
    """A call with the whole prompt, then two with one token each on the cache that the last one returned."""

    def call(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        inputs = dict(batch)
        prompt, outputs = inputs.pop(ids), []
        cache = None
        for part in (prompt[:, :-2], prompt[:, -2:-1], prompt[:, -1:]):
            out = model(**inputs, **{ids: part}, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            outputs.append(out.logits)
        return outputs, cache

    return call


def _prompt(ids: str = "input_ids") -> Callable[[Batch], Batch]:
    """What a cached call begins with."""
    return lambda batch: {**batch, ids: batch[ids][:, :-2], "use_cache": True}


def _entry(name: str, model: str, config: str, batch: Callable[[int], Batch], /, **options: Any) -> Entry:
    return Entry(f"hf_{name}", hugging_face(model, config, **options), batch)


def _with_cache(entry: Entry, batch: Callable[[int], Batch], ids: str = "input_ids") -> Entry:
    return Entry(f"{entry.name}_cache", entry.make, batch, _cached(ids), example=_prompt(ids))


ENCODERS = (
    _entry("albert", "AlbertModel", "AlbertConfig", text, **{**TINY, "embedding_size": 32}),
    _entry("bert", "BertModel", "BertConfig", text, **TINY),
    _entry(
        "bert_hidden_states", "BertModel", "BertConfig", lambda n: {**text(n), "output_hidden_states": True}, **TINY
    ),
    _entry(
        "deberta_v2",
        "DebertaV2Model",
        "DebertaV2Config",
        text,
        **TINY,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    _entry(
        "distilbert",
        "DistilBertModel",
        "DistilBertConfig",
        text,
        vocab_size=WORDS,
        dim=64,
        n_layers=2,
        n_heads=4,
        hidden_dim=128,
        max_position_embeddings=64,
    ),
    _entry("electra", "ElectraModel", "ElectraConfig", text, **{**TINY, "embedding_size": 32}),
    _entry(
        "funnel",
        "FunnelModel",
        "FunnelConfig",
        text,
        vocab_size=WORDS,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=64,
        n_head=4,
        d_head=16,
        d_inner=128,
    ),
    _entry("longformer", "LongformerModel", "LongformerConfig", text, **{**TINY, "attention_window": 8}),
    _entry(
        "modernbert",
        "ModernBertModel",
        "ModernBertConfig",
        text,
        **{
            **TINY,
            "global_attn_every_n_layers": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    _entry("mpnet", "MPNetModel", "MPNetConfig", text, **{**TINY, "pad_token_id": 1}),
    _entry("roberta", "RobertaModel", "RobertaConfig", text, **{**TINY, "pad_token_id": 1}),
    _entry("xlnet", "XLNetModel", "XLNetConfig", text, vocab_size=WORDS, d_model=64, n_layer=2, n_head=4, d_inner=128),
)

LLAMA = _entry("llama", "LlamaForCausalLM", "LlamaConfig", text, **DECODER)
GPT2 = _entry("gpt2", "GPT2LMHeadModel", "GPT2Config", text, **TINY_GPT2)
DECODERS = (
    GPT2,
    LLAMA,
    _entry("gemma2", "Gemma2ForCausalLM", "Gemma2Config", text, **DECODER, sliding_window=16),
    _entry("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", text, **TINY),
    _entry(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        _start,
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _entry("mixtral", "MixtralForCausalLM", "MixtralConfig", text, **DECODER, num_local_experts=4),
    _entry(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        text,
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=128,
        max_position_embeddings=64,
        word_embed_proj_dim=64,
    ),
    _entry("phi", "PhiForCausalLM", "PhiConfig", text, **{**TINY, "bos_token_id": 1, "eos_token_id": 2}),
    _entry("qwen2", "Qwen2ForCausalLM", "Qwen2Config", text, **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    _entry("qwen3", "Qwen3ForCausalLM", "Qwen3Config", text, **DECODER),
    _with_cache(LLAMA, _start),
    _with_cache(GPT2, _start),
)

T5 = _entry("t5", "T5ForConditionalGeneration", "T5Config", _pairs, **TINY_T5)
BART = _entry(
    "bart",
    "BartForConditionalGeneration",
    "BartConfig",
    _pairs,
    vocab_size=WORDS,
    **ENCODER_DECODER,
    max_position_embeddings=64,
)
WHISPER = _entry(
    "whisper",
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    lambda n: {"input_features": torch.randn(n, SOUNDS, 64), "decoder_input_ids": torch.randint(3, WORDS, (n, 8))},
    **TINY_WHISPER,
)
SEQUENCES = (
    T5,
    BART,
    WHISPER,
    _entry(
        "marian",
        "MarianMTModel",
        "MarianConfig",
        _pairs,
        vocab_size=WORDS,
        **ENCODER_DECODER,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    ),
    _with_cache(T5, T5.batch, "decoder_input_ids"),
    _with_cache(WHISPER, WHISPER.batch, "decoder_input_ids"),
)

WAV2VEC = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}


def _clip(size: int) -> dict[str, Tensor]:
    return {**text(size, 16), **_pixels()(size)}


def _sam_masks() -> nn.Module:
    library = import_library("transformers")
    config = library.SamMaskDecoderConfig(hidden_size=32, mlp_dim=64, num_attention_heads=4, iou_head_hidden_dim=32)
    module = importlib.import_module("transformers.models.sam.modeling_sam")
    decoder: nn.Module = module.SamMaskDecoder(config)
    return decoder


def _sam_batch(size: int) -> dict[str, Any]:
    return {
        "image_embeddings": torch.randn(size, 32, 8, 8),
        "image_positional_embeddings": torch.randn(size, 32, 8, 8),
        "sparse_prompt_embeddings": torch.randn(size, 1, 2, 32),
        "dense_prompt_embeddings": torch.randn(size, 32, 8, 8),
        "multimask_output": True,
    }


def _depth_anything() -> nn.Module:
    library = import_library("transformers")
    backbone = library.Dinov2Config(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=42,
        patch_size=14,
        reshape_hidden_states=False,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = library.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=64,
        neck_hidden_sizes=[16, 32, 64, 64],
        fusion_hidden_size=32,
        patch_size=14,
        head_hidden_size=16,
    )
    model: nn.Module = library.DepthAnythingForDepthEstimation(config)
    return model


def _encodec() -> nn.Module:
    model = hugging_face(
        "EncodecModel",
        "EncodecConfig",
        num_filters=8,
        hidden_size=32,
        codebook_dim=32,
        codebook_size=64,
        upsampling_ratios=[4, 4, 2, 2],
        num_lstm_layers=1,
    )()
    for name, buffer in model.named_buffers():
        if name.endswith(".embed"):  # its code books start at zero
            buffer.normal_()
    return model


def _code_vocoder() -> nn.Module:
    model = hugging_face(
        "SeamlessM4TCodeHifiGan",
        "SeamlessM4TConfig",
        unit_hifi_gan_vocab_size=40,
        unit_embed_dim=32,
        lang_embed_dim=8,
        spkr_embed_dim=8,
        upsample_initial_channel=32,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        vocoder_num_langs=3,
        vocoder_num_spkrs=3,
    )()
    # Every unit lasts one frame: else a duration beside the middle of two integers decides the length of the sound.
    nn.init.constant_(model.dur_predictor.proj.bias, -6.0)
    return model


def _detr() -> nn.Module:
    library = import_library("transformers")
    backbone = library.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 64],
        depths=[1, 1, 1, 1],
        out_features=["stage4"],
        layer_type="basic",
    )
    config = library.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        **ENCODER_DECODER,
        num_queries=10,
        num_labels=5,
    )
    model: nn.Module = library.DetrForObjectDetection(config)
    return model


PERCEPTION = (
    _entry(
        "ast",
        "ASTForAudioClassification",
        "ASTConfig",
        lambda n: {"input_values": torch.randn(n, 64, 32)},
        **{k: v for k, v in VISION.items() if k != "image_size"} | {"max_length": 64, "num_mel_bins": 32},
    ),
    Entry(
        "hf_clip",
        hugging_face(
            "CLIPModel",
            "CLIPConfig",
            text_config={**TINY, "bos_token_id": 1, "eos_token_id": 2},
            vision_config=VISION,
            projection_dim=32,
        ),
        _clip,
    ),
    _entry("clip_vision", "CLIPVisionModel", "CLIPVisionConfig", _pixels(), **VISION),
    Entry("hf_depth_anything", _depth_anything, _pixels(42)),
    Entry("hf_detr", _detr, lambda n: {**_pixels(64)(n), "pixel_mask": torch.ones(n, 64, 64, dtype=torch.int64)}),
    _entry(
        "dinov2",
        "Dinov2Model",
        "Dinov2Config",
        _pixels(),
        **{k: v for k, v in VISION.items() if k != "intermediate_size"},
    ),
    Entry("hf_encodec", _encodec, lambda n: {"input_values": torch.randn(n, 1, 640)}),
    _entry("hubert", "HubertModel", "HubertConfig", _sound(4000), **WAV2VEC),
    _entry(
        "mobilevit",
        "MobileViTForImageClassification",
        "MobileViTConfig",
        _pixels(64),
        image_size=64,
        hidden_sizes=[32, 48, 64],
        neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 128],
    ),
    _entry(
        "patchtst",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        lambda n: {"past_values": torch.randn(n, 32, 3)},
        num_input_channels=3,
        context_length=32,
        prediction_length=8,
        patch_length=4,
        patch_stride=4,
        d_model=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=128,
    ),
    Entry("hf_sam_mask", _sam_masks, _sam_batch),
    _entry(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        _pixels(64),
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 64, 64],
        decoder_hidden_size=64,
        num_attention_heads=[1, 2, 4, 4],
    ),
    _entry(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        _pixels(64),
        image_size=64,
        patch_size=4,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    Entry(
        "hf_vits_like_seamless",
        _code_vocoder,
        lambda n: {
            "input_ids": torch.randint(4, 40, (n, 12)),
            "spkr_id": torch.zeros(n, 1, dtype=torch.int64),
            "lang_id": torch.zeros(n, 1, dtype=torch.int64),
        },
    ),
    _entry("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", _sound(4000), **WAV2VEC),
    _entry(
        "wav2vec2_conformer",
        "Wav2Vec2ConformerModel",
        "Wav2Vec2ConformerConfig",
        _sound(4000),
        **WAV2VEC,
        position_embeddings_type="relative",
    ),
)


def _diffuser(model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        built: nn.Module = getattr(import_library("diffusers"), model)(**options)
        return built

    return make


def _noise(side: int, channels: int, **more: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    return lambda size: {
        "sample": torch.randn(size, channels, side, side),
        "timestep": torch.randint(1000, (size,)),
        **{name: part(size) for name, part in more.items()},
    }


BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "sample_size": 16}
DIFFUSERS = (
    Entry(
        "diff_dit",
        _diffuser(
            "DiTTransformer2DModel",
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=1000,
            norm_num_groups=8,
        ),
        lambda n: {
            "hidden_states": torch.randn(n, 4, 8, 8),
            "timestep": torch.randint(1000, (n,)),
            "class_labels": torch.randint(1000, (n,)),
        },
    ),
    Entry(
        "diff_unet2d",
        _diffuser(
            "UNet2DModel",
            **BLOCKS,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
        ),
        _noise(16, 3),
    ),
    Entry(
        "diff_unet2dcond",
        _diffuser(
            "UNet2DConditionModel",
            **BLOCKS,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
        ),
        _noise(16, 4, encoder_hidden_states=lambda n: torch.randn(n, 7, 32)),
    ),
    Entry(
        "diff_vae",
        _diffuser(
            "AutoencoderKL",
            **BLOCKS,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        ),
        lambda n: {"sample": torch.randn(n, 3, 16, 16)},
    ),
)

LANGUAGE = (*ENCODERS, *DECODERS, *SEQUENCES, *PERCEPTION, *DIFFUSERS)
