//! Bytes and counts: checked, exact, and shown in GiB only at the edge.
