//! Which orders cause trouble, and which: one in a hundred, always the same ones.

/// What will go wrong when an order is to be paid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The payment provider does not answer the first time.
    Timeout,
    /// The payment provider is busy twice.
    Busy,
    /// The order comes with an expired card.
    ExpiredCard,
    /// The order comes without a postcode.
    NoPostcode,
    /// The fraud check never answers.
    NoFraudCheck,
}

impl Trouble {
    /// The trouble with an order, if any.
    pub(crate) fn of(order: u64) -> Option<Self> {
        match scatter(order) % 1000 {
            0..=3 => Some(Self::Timeout),
            4..=5 => Some(Self::Busy),
            6..=7 => Some(Self::ExpiredCard),
            8 => Some(Self::NoPostcode),
            9 => Some(Self::NoFraudCheck),
            _ => None,
        }
    }

    /// Which attempt overcomes it, if one does.
    pub(crate) fn recovers_at(self) -> Option<u32> {
        match self {
            Self::Timeout => Some(2),
            Self::Busy => Some(3),
            Self::ExpiredCard | Self::NoPostcode | Self::NoFraudCheck => None,
        }
    }
}

/// Trouble does not come evenly spaced: the finalizer of SplitMix64.
fn scatter(number: u64) -> u64 {
    let mut x = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn about_one_order_in_a_hundred() {
        let troubles: Vec<Trouble> = (1..=100_000).filter_map(Trouble::of).collect();
        assert!((900..1100).contains(&troubles.len()), "{}", troubles.len());
        let recovering = troubles.iter().filter(|t| t.recovers_at().is_some()).count();
        assert!((500..700).contains(&recovering), "{recovering}");
    }
}
