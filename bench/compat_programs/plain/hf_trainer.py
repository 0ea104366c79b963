"""Hugging Face's Trainer: a GPT-2 with tied weights, on sentences of many lengths."""

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

NUM_SENTENCES, VOCABULARY, LENGTH, EPOCHS = 1200, 61, 16, 2


def sentences(seed, count):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        size = int(torch.randint(4, LENGTH + 1, (), generator=generator))
        tokens = torch.randint(1, 4, (size,), generator=generator).cumsum(0) % VOCABULARY
        padding = LENGTH - size
        yield {
            "input_ids": torch.cat([tokens, tokens.new_zeros(padding)]),
            "attention_mask": torch.cat([torch.ones(size).long(), tokens.new_zeros(padding)]),
            "labels": torch.cat([tokens, tokens.new_full((padding,), -100)]),
        }


def main():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=EPOCHS,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=0.5,
        train_sampling_strategy="sequential",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=list(sentences(1, NUM_SENTENCES)),
        eval_dataset=list(sentences(2, 40)),
    )
    trainer.train()
    torch.save(trainer.model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
