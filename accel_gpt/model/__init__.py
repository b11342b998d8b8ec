"""The GPT: layers, loss, document mask, generation. No Accelerate, no optimizer."""
