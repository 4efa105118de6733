//! Stage 1: bytes and text into facts.
