//! What a batch, its items and its controls look like: `PostgreSQL` beneath.
