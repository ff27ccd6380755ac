//! The orders of a web shop: about 300 bytes of JSON each, the same ones in every run.

use serde::{Deserialize, Serialize};

use super::trouble::Trouble;

/// An order as it was placed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) id: u64,
    pub(crate) customer: String,
    pub(crate) items: Vec<Item>,
    /// In cents, as all amounts.
    pub(crate) total: u64,
    pub(crate) currency: Currency,
    pub(crate) card: Card,
    pub(crate) ship_to: Address,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Item {
    sku: String,
    quantity: u64,
    price: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Card {
    last4: String,
    /// Year and month.
    pub(crate) expires: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Address {
    city: String,
    pub(crate) postcode: Option<String>,
    country: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum Currency {
    Eur,
    Usd,
}

const PRODUCTS: &[(&str, u64)] = &[
    ("espresso-beans-1kg", 2490),
    ("filter-papers-100", 390),
    ("ceramic-dripper", 1850),
    ("hand-grinder-steel", 8900),
    ("milk-jug-350ml", 2200),
    ("kettle-gooseneck", 6450),
    ("scale-0.1g", 4990),
];

const CITIES: &[(&str, &str, Currency)] = &[
    ("Lyon", "FR", Currency::Eur),
    ("Hamburg", "DE", Currency::Eur),
    ("Bologna", "IT", Currency::Eur),
    ("Valencia", "ES", Currency::Eur),
    ("Portland", "US", Currency::Usd),
    ("Austin", "US", Currency::Usd),
];

/// So many customers, or fewer.
const CUSTOMERS: u64 = 5_000;

impl Order {
    /// The order with this number.
    pub(crate) fn numbered(id: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(id);
        let items: Vec<Item> = (0..rng.usize(1..=3))
            .map(|_| {
                let (sku, price) = PRODUCTS[rng.usize(..PRODUCTS.len())];
                Item { sku: sku.to_owned(), quantity: rng.u64(1..=3), price }
            })
            .collect();
        let (city, country, currency) = CITIES[rng.usize(..CITIES.len())];
        let trouble = Trouble::of(id);
        let expires = match trouble {
            Some(Trouble::ExpiredCard) => format!("2021-{:02}", rng.u8(1..=12)),
            _ => format!("{}-{:02}", rng.u16(2090..2096), rng.u8(1..=12)),
        };
        let postcode = match trouble {
            Some(Trouble::NoPostcode) => None,
            _ => Some(format!("{:05}", rng.u32(1000..99_999))),
        };
        Self {
            id,
            customer: format!("customer-{:04}", rng.u64(1..=CUSTOMERS)),
            total: items.iter().map(|item| item.quantity * item.price).sum(),
            items,
            currency,
            card: Card { last4: format!("{:04}", rng.u32(..10_000)), expires },
            ship_to: Address { city: city.to_owned(), postcode, country: country.to_owned() },
        }
    }
}

impl Currency {
    pub(crate) const ALL: [Self; 2] = [Self::Eur, Self::Usd];

    /// As it is written in the JSON.
    pub(crate) fn code(self) -> &'static str {
        match self {
            Self::Eur => "EUR",
            Self::Usd => "USD",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_always_the_same_and_of_fair_size() {
        let json = |id| serde_json::to_string(&Order::numbered(id)).unwrap();
        assert_eq!(json(7), json(7));
        let mean = (1..=1000).map(|id| json(id).len()).sum::<usize>() / 1000;
        assert!((200..=400).contains(&mean), "{mean}");
    }

    #[test]
    fn codes_are_those_of_the_json() {
        for currency in Currency::ALL {
            assert_eq!(serde_json::to_value(currency).unwrap(), currency.code());
        }
    }
}
