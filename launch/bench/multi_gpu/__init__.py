"""``bench multi-gpu``: what only several GPUs can show, in one command: parity of layouts, exchanges, throughput, a shared host pool."""
