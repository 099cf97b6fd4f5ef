"""Command line, torchrun entry point, benchmarks and the embedded model."""
