//! The schema that holds an installation, and SQL texts rendered for it.

use crate::error::{Error, ErrorKind, Result};
use crate::name::shorten;

/// A schema name, quoted once and for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schema {
    name: String,
    quoted: String,
}

impl Schema {
    pub(crate) const DEFAULT: &'static str = "sqlstreams";

    /// PostgreSQL cuts identifiers off at 63 bytes; refused here rather than cut.
    pub(crate) fn new(name: &str) -> Result<Self> {
        if name.is_empty() || name.len() > 63 || name.contains('\0') || name.starts_with("pg_") {
            return Err(Error::new(
                ErrorKind::InvalidName,
                format!("{} cannot be the name of a schema", shorten(name)),
            )
            .with_hint("A schema name has 1 to 63 bytes, no NUL, and does not start with pg_."));
        }
        Ok(Self { name: name.to_owned(), quoted: format!("\"{}\"", name.replace('"', "\"\"")) })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn quoted(&self) -> &str {
        &self.quoted
    }

    /// Puts the schema into a query text of `sql/queries`.
    pub(crate) fn render(&self, text: &str) -> String {
        text.replace("{schema}", &self.quoted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_are_doubled() {
        assert_eq!(Schema::new(r#"a"b"#).unwrap().quoted(), r#""a""b""#);
        assert_eq!(Schema::new("x").unwrap().render("SELECT {schema}.f()"), r#"SELECT "x".f()"#);
    }

    #[test]
    fn impossible_names_are_refused() {
        for name in ["", "pg_x", "a\0", &"x".repeat(64)] {
            assert_eq!(Schema::new(name).unwrap_err().kind(), ErrorKind::InvalidName);
        }
    }
}
