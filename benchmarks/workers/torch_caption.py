"""ViT + GPT-2 of transformers v5 on torch, f32. `prepare` creates the random model that all systems load."""

from measure import Worker
from torch_t5 import run
from workloads import caption_sizes_and_works


def main() -> None:
    worker = Worker(__doc__, works=caption_sizes_and_works)
    import torch
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    sizes = worker.sizes
    torch.set_num_threads(worker.threads)
    if worker.workload == "prepare":
        torch.manual_seed(0)
        encoder = ViTConfig(
            hidden_size=sizes.d_model,
            num_hidden_layers=sizes.n_layers,
            num_attention_heads=sizes.n_heads,
            intermediate_size=sizes.d_ff,
            image_size=sizes.image,
            patch_size=sizes.patch,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        special = {"bos_token_id": sizes.vocab_size - 1, "eos_token_id": sizes.vocab_size - 1}
        decoder = GPT2Config(
            vocab_size=sizes.vocab_size,
            n_embd=sizes.d_model,
            n_layer=sizes.n_layers,
            n_head=sizes.n_heads,
            n_inner=sizes.d_ff,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **special,
        )
        config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        special |= {"decoder_start_token_id": sizes.vocab_size - 1, "pad_token_id": sizes.vocab_size - 1}
        for name, token in special.items():
            setattr(config, name, token)
        model = VisionEncoderDecoderModel(config)
        model.generation_config.update(**special)
        # With the usual initialisation, a random model generates the same caption for every image. With large layers
        # and small embeddings the output depends on the image, and a gain at the end keeps the logits near 1. Only then
        # is it meaningful that systems generate equal tokens and losses.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "wpe" not in name:
                    parameter *= 0.5 if "wte" in name else 4.0
            model.decoder.transformer.ln_f.weight *= 6
        model.save_pretrained(worker.model_dir)
        return

    model = VisionEncoderDecoderModel.from_pretrained(worker.model_dir, dtype=torch.float32).eval()
    run(worker, model, "pixel_values")


if __name__ == "__main__":
    main()
