//! An error and its causes in one text, for dead letters.

use std::error::Error as StdError;
use std::fmt::Write;

use tokio_postgres::error::DbError;

/// What an error says, and what its sources say beyond that.
pub(crate) fn describe(error: &(dyn StdError + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        next = error.source();
        match error.downcast_ref::<DbError>() {
            Some(said) => tell(&mut text, said),
            // Of an error of the server the driver says no more than that it is one.
            None if error.is::<tokio_postgres::Error>()
                && next.is_some_and(|e| e.is::<DbError>()) => {}
            None => add(&mut text, &error.to_string()),
        }
    }
    text
}

/// The message, and what tells the row that it is about.
fn tell(text: &mut String, said: &DbError) {
    add(text, said.message());
    // A String can always be written to.
    let _ = write!(text, " (SQLSTATE {}", said.code().code());
    if let Some(constraint) = said.constraint().filter(|name| !said.message().contains(name)) {
        let _ = write!(text, ", constraint {constraint}");
    }
    text.push(')');
    if let Some(detail) = said.detail() {
        let _ = write!(text, ": {detail}");
    }
}

/// Some errors repeat their source.
fn add(text: &mut String, part: &str) {
    if text.contains(part) {
        return;
    }
    if !text.is_empty() {
        text.push_str(": ");
    }
    text.push_str(part);
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the shop is closed")]
    struct Closed(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("no order: {0}")]
    struct Repeats(#[source] Closed);

    #[test]
    fn sources_are_told_once() {
        let closed = || Closed(io::Error::other("out of milk"));
        assert_eq!(describe(&closed()), "the shop is closed: out of milk");
        assert_eq!(describe(&Repeats(closed())), "no order: the shop is closed: out of milk");
        let text: Box<dyn StdError + Send + Sync> = "just so".into();
        assert_eq!(describe(&*text), "just so");
    }
}
