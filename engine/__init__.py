"""The engine: configuration, weights, models, scheduler, runner, sampler and the LLM front."""
