//! What becomes of a message that was sent.

/// Where a message was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// Its id in the stream; for a duplicate, that of the message that was there before. A delayed message's is of another
    /// kind: by it the message can be [cancelled](crate::Stream::cancel_delayed) until it gets its id in the stream.
    pub id: i64,
    /// Whether it was put off, so that it is not in the stream yet.
    pub delayed: bool,
    /// Whether a message with the same idempotency key was there before, so that this one was not stored. `None` for
    /// whatever was sent without a key.
    pub duplicate: Option<Duplicate>,
}

/// A message whose idempotency key another had before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Duplicate {
    /// It has the same payload: the same message, sent once more.
    SamePayload,
    /// It has another payload: most likely a mistake of the sender's, who gave two messages one key. The first one stays.
    OtherPayload,
}

impl Receipt {
    /// Whether it was not stored, since another with its idempotency key was there before.
    pub fn is_duplicate(&self) -> bool {
        self.duplicate.is_some()
    }
}
