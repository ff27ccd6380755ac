//! The messages that are sent.

use serde::{Deserialize, Serialize};

/// A number and as many bytes as it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ping {
    pub(crate) n: u64,
    pad: String,
}

impl Ping {
    /// `bytes` of JSON, if the number leaves room for them.
    pub(crate) fn numbered(n: u64, bytes: usize) -> Self {
        let bare = r#"{"n":,"pad":""}"#.len() + n.to_string().len();
        Self { n, pad: "x".repeat(bytes.saturating_sub(bare)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_as_long_as_it_should_be() {
        for n in [0, 7, 123_456] {
            assert_eq!(serde_json::to_vec(&Ping::numbered(n, 256)).unwrap().len(), 256);
        }
        assert_eq!(Ping::numbered(5, 1).pad, "");
    }
}
