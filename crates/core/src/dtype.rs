//! Element formats.
