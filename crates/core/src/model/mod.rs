//! Stage 2: facts into a model.
