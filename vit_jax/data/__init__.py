"""Sources, transforms and the pipeline: files in, host batches out."""
