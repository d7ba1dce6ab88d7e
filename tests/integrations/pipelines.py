"""Tiny random pipelines of diffusers, built from configurations without a download."""

import json
import logging

import torch

SIDE = 64  # of images


def silent(build):
    """Build without the messages of transformers and diffusers about missing weights and components."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        torch.manual_seed(0)
        pipe = build()
    finally:
        logging.disable(before)
    pipe.set_progress_bar_config(disable=True)
    liven(network_of(pipe))
    return pipe


def network_of(pipe):
    return pipe.transformer.eval()


def liven(network, seed=0):
    """Draw weights that are initialised to zero at random, so that every layer matters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        if parameter.ndim > 1 and not bool(parameter.any()):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05


def vae(channels=4, **options):
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4,) * 4,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=2,
        sample_size=SIDE,
        scaling_factor=1.5,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **options,
    ).eval()


def clip(folder, words=("a", "cat", "dog", "red", "blue", "house")):
    """Return a random text encoder and a tokenizer of a few words."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    letters = sorted({letter for word in words for letter in word})
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer.from_pretrained(str(folder), model_max_length=16)
    config = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=16,
        bos_token_id=len(tokens) - 2,
        eos_token_id=len(tokens) - 1,
        pad_token_id=len(tokens) - 1,
    )
    return CLIPTextModelWithProjection(config).eval(), tokenizer


def sd3(text=None, **scheduler):
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    def build():
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=32,
            pos_embed_max_size=8,
        )
        encoders = (None, None, None, None) if text is None else (*text, *text)
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, **scheduler),
            vae=vae(),
            text_encoder=encoders[0],
            tokenizer=encoders[1],
            text_encoder_2=encoders[2],
            tokenizer_2=encoders[3],
            text_encoder_3=None,
            tokenizer_3=None,
        )

    return silent(build)


def flux(guidance=True):
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    def build():
        transformer = FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(2, 2, 4),
            guidance_embeds=guidance,
        )
        none = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        return FluxPipeline(transformer=transformer, scheduler=scheduler, vae=vae(), **none)

    return silent(build)


def lumina2():
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    def build():
        transformer = Lumina2Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=1,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=4,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(32, 16, 16),
            cap_feat_dim=32,
        )
        scheduler = FlowMatchEulerDiscreteScheduler()
        return Lumina2Pipeline(
            transformer=transformer, scheduler=scheduler, vae=vae(), text_encoder=None, tokenizer=None
        )

    return silent(build)


def auraflow():
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    def build():
        transformer = AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=64,
        )
        scheduler = FlowMatchEulerDiscreteScheduler(shift=1.73)
        return AuraFlowPipeline(
            transformer=transformer, scheduler=scheduler, vae=vae(), text_encoder=None, tokenizer=None
        )

    return silent(build)


def sana():
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel

    def build():
        transformer = SanaTransformer2DModel(
            sample_size=8,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=8,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=32,
        )
        coder = AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        ).eval()
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        return SanaPipeline(transformer=transformer, scheduler=scheduler, vae=coder, text_encoder=None, tokenizer=None)

    return silent(build)


def embeddings(name, count=2, guided=True, width=32, length=5):
    """Return the arguments of a pipeline without text encoders: random embeddings, and the size of images."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    found = {"prompt_embeds": draw(count, length, width), "num_inference_steps": 3}
    both = {"negative_prompt_embeds": draw(count, length, width)}
    if name in ("sd3", "flux"):
        found["pooled_prompt_embeds"] = draw(count, width)
        both["negative_pooled_prompt_embeds"] = draw(count, width)
    if name in ("lumina2", "auraflow", "sana"):
        found["prompt_attention_mask"] = torch.ones(
            count, length, dtype=torch.bool if name == "lumina2" else torch.int64
        )
        both["negative_prompt_attention_mask"] = found["prompt_attention_mask"]
    if name == "sana":
        found["use_resolution_binning"] = False
        found["negative_prompt"] = None
    side = 32 if name == "sana" else SIDE
    found |= {"height": side, "width": side}
    if guided:
        return found | both | ({"true_cfg_scale": 4.0} if name == "flux" else {"guidance_scale": 4.0})
    return found | ({} if name == "flux" else {"guidance_scale": 1.0})


PIPELINES = {"sd3": sd3, "flux": flux, "lumina2": lumina2, "auraflow": auraflow, "sana": sana}
