"""Operations of the model as pure functions of arrays: one per file, each with its plain-JAX
reference (what a CPU runs) and its Pallas kernel. Knows no model, no file and no configuration."""
