"""Config-driven fine-tuning of Hugging Face causal language models on one GPU."""

__version__ = "0.1.0"
