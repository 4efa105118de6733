"""full.py: asks for more and more until the card is full, as a batch that grows does."""
import torch

kept = []
for size in range(1, 1000):
    kept.append(torch.zeros(size << 28, device="cuda", dtype=torch.uint8))
