//! What a binding means, written down a second time: for comparing with what the SQL does.

use fastrand::Rng;
use serde_json::{Map, Value, json};

/// A message as far as bindings look at it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub routing_key: Option<String>,
    pub headers: Option<Value>,
}

/// Whether a message is for a group with these bindings.
pub fn is_for(bindings: &[Value], message: &Sample) -> bool {
    bindings.is_empty() || bindings.iter().any(|binding| matches(binding, message))
}

/// Whether one binding matches.
pub fn matches(binding: &Value, message: &Sample) -> bool {
    let pattern = binding.as_str().or_else(|| binding["pattern"].as_str());
    let words: Vec<&str> = match message.routing_key.as_deref() {
        None | Some("") => Vec::new(),
        Some(key) => key.split('.').collect(),
    };
    let by_key = pattern.is_none_or(|pattern| {
        let pattern: Vec<&str> = pattern.split('.').collect();
        fits(&pattern, &words)
    });
    let wanted = binding.get("headers").and_then(Value::as_object).filter(|w| !w.is_empty());
    let by_headers = wanted.is_none_or(|wanted| {
        message.headers.as_ref().is_some_and(|headers| contains(headers, &wanted.clone().into()))
    });
    by_key && by_headers
}

fn fits(pattern: &[&str], words: &[&str]) -> bool {
    match pattern.split_first() {
        None => words.is_empty(),
        Some((&"#", rest)) => (0..=words.len()).any(|n| fits(rest, &words[n..])),
        Some((&"*", rest)) => !words.is_empty() && fits(rest, &words[1..]),
        Some((word, rest)) => words.first() == Some(word) && fits(rest, &words[1..]),
    }
}

fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().all(|(name, part)| whole.get(name).is_some_and(|w| contains(w, part)))
        }
        (Value::Array(whole), Value::Array(part)) => {
            part.iter().all(|part| whole.iter().any(|w| contains(w, part)))
        }
        _ => whole == part,
    }
}

/// Words that mean something to SQL, to regular expressions, to `format` or to arrays.
const WORDS: [&str; 36] = [
    "a", "a", "b", "b", "A", "é", "日本", "🦀", "'", "''", "\\", "\\'", "\"", "%", "%s", "%1$L",
    "$1", "$", "^", "(", ")", "[x]", "]", "{2}", "}", "|", "+", "?", "a b", " ", "\n", "-", "_",
    "{a,b}", "NULL", ":",
];

fn word(random: &mut Rng) -> String {
    let word = WORDS[random.usize(0..WORDS.len())];
    match random.u32(0..6) {
        0 => format!("{word}{}", WORDS[random.usize(0..WORDS.len())]),
        _ => word.to_owned(),
    }
}

pub fn pattern(random: &mut Rng) -> String {
    let words = (0..random.u32(1..6)).map(|_| match random.u32(0..5) {
        0 => "*".to_owned(),
        1 => "#".to_owned(),
        _ => word(random),
    });
    words.collect::<Vec<_>>().join(".")
}

fn value(random: &mut Rng) -> Value {
    match random.u32(0..7) {
        0 => Value::Null,
        1 => random.bool().into(),
        2 => random.i32(0..3).into(),
        3 => json!({"a": random.i32(0..2), "b": [1, {"c": "'"}]}),
        4 => json!([random.i32(0..2), "x"]),
        _ => word(random).into(),
    }
}

pub fn headers(random: &mut Rng) -> Value {
    let mut headers = Map::new();
    for _ in 0..random.u32(0..4) {
        headers.insert(["x", "y", "'; --", "%L"][random.usize(0..4)].to_owned(), value(random));
    }
    headers.into()
}

/// What a header condition may ask of such headers.
fn part(random: &mut Rng, of: Option<&Value>) -> Value {
    let mut part = match of {
        Some(Value::Object(headers)) => headers.clone(),
        _ => return headers(random),
    };
    part.retain(|_, _| random.bool());
    for value in part.values_mut() {
        match value {
            Value::Object(inner) => inner.retain(|_, _| random.bool()),
            Value::Array(items) => items.retain(|_| random.bool()),
            _ => {}
        }
    }
    part.into()
}

/// A key that a pattern matches, or nearly.
fn key_like(random: &mut Rng, pattern: &str) -> String {
    let mut words = Vec::new();
    for word in pattern.split('.') {
        match word {
            "#" => words.extend((0..random.u32(0..3)).map(|_| self::word(random))),
            "*" => words.push(self::word(random)),
            _ => words.push(word.to_owned()),
        }
    }
    match random.u32(0..8) {
        0 => words.push(word(random)),
        1 if !words.is_empty() => drop(words.remove(random.usize(0..words.len()))),
        2 => words.insert(random.usize(0..=words.len()), String::new()),
        _ => {}
    }
    words.join(".")
}

/// A few bindings, and messages most of which have to do with them.
pub fn case(random: &mut Rng, messages: usize) -> (Vec<Value>, Vec<Sample>) {
    let patterns: Vec<String> = (0..random.u32(1..5)).map(|_| pattern(random)).collect();
    let samples: Vec<Sample> = (0..messages)
        .map(|_| {
            let routing_key = match random.u32(0..12) {
                0 => None,
                1 => Some(String::new()),
                2 => Some(key_like(random, "#.#.*")),
                _ => {
                    let pattern = &patterns[random.usize(0..patterns.len())];
                    Some(key_like(random, pattern))
                }
            };
            let headers = random.bool().then(|| headers(random));
            Sample { routing_key, headers }
        })
        .collect();
    let bindings = patterns.into_iter().map(|pattern| {
        let of = samples[random.usize(0..samples.len())].headers.as_ref();
        match random.u32(0..6) {
            0 => json!({"pattern": pattern, "headers": part(random, of)}),
            1 => match part(random, of) {
                Value::Object(none) if none.is_empty() => pattern.into(),
                part => json!({"headers": part}),
            },
            2 => json!({"pattern": pattern}),
            _ => pattern.into(),
        }
    });
    (bindings.collect(), samples)
}
