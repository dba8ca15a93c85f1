"""Training a model that stops: tokenizer, base, mid, SFT and RL, each stage a Hugging Face directory."""
