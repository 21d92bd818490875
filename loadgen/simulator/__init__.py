"""A fleet in virtual time: real vLLM schedulers, the product's own policies; only the model's time is made up."""
