"""Fine-tuning of T-CNNs: the loop over epochs, parameter groups and stochastic depth."""
