"""Vision Transformers in JAX: train, fine-tune, evaluate and look inside."""
