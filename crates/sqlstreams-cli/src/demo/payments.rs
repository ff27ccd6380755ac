//! The handler of the group `payments`, before and after its fix.

use std::fmt;

use sqlstreams::{Delivery, Outcome};

use super::orders::Order;
use super::trouble::Trouble;

/// Attempts until a payment is given up.
pub(crate) const ATTEMPTS: u32 = 3;

/// The service that charges the cards.
#[derive(Debug)]
pub(crate) struct Payments {
    /// Year and month.
    today: String,
    /// The version that asks the bank for the new card, looks postcodes up and reaches the fraud check.
    fixed: bool,
}

/// What may be over by the next attempt.
#[derive(Debug)]
pub(crate) enum PaymentError {
    ProviderTimeout,
    ProviderBusy,
    NoFraudCheck,
}

impl std::error::Error for PaymentError {}

impl Payments {
    pub(crate) fn with_bugs() -> Self {
        Self { today: jiff::Timestamp::now().strftime("%Y-%m").to_string(), fixed: false }
    }

    pub(crate) fn fixed() -> Self {
        Self { fixed: true, ..Self::with_bugs() }
    }

    /// Charges the card.
    pub(crate) fn charge(&self, message: &Delivery<Order>) -> Result<Outcome, PaymentError> {
        let order = &message.payload;
        if !self.fixed && order.card.expires < self.today {
            return Ok(Outcome::Dead("card declined: expired card".to_owned()));
        }
        if !self.fixed && order.ship_to.postcode.is_none() {
            return Ok(Outcome::Dead("malformed address: no postcode".to_owned()));
        }
        self.ask_others(order.id, message.attempt())?;
        Ok(Outcome::Done)
    }

    /// Stands in for the services of others.
    fn ask_others(&self, order: u64, attempt: u32) -> Result<(), PaymentError> {
        match Trouble::of(order) {
            Some(Trouble::Timeout) if attempt < 2 => Err(PaymentError::ProviderTimeout),
            Some(Trouble::Busy) if attempt < 3 => Err(PaymentError::ProviderBusy),
            Some(Trouble::NoFraudCheck) if !self.fixed => Err(PaymentError::NoFraudCheck),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for PaymentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ProviderTimeout => "payment provider: no answer within 2 s",
            Self::ProviderBusy => "payment provider: 503 Service Unavailable",
            Self::NoFraudCheck => "fraud check: risk-api is unreachable",
        })
    }
}
