//! Messages as rows of a Parquet file, for other programs to read, and for reading back.
//!
//! Columns: `id`, `key`, `routing_key`, `headers` (JSON), `produced_at`, `expires_at` (microseconds, UTC), and `payload`, which is JSON, text or bytes,
//! and null for a tombstone. What stream it is from is in the file's metadata, under `sqlstreams.export`.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ::parquet::basic::{Compression, ConvertedType, Type as Physical};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl, get_typed_column_reader};
use ::parquet::data_type::{ByteArray, ByteArrayType, DataType, Int64Type};
use ::parquet::errors::{ParquetError, Result};
use ::parquet::file::metadata::KeyValue;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;
use sqlstreams::{PayloadType, Record};

use super::{About, FORMAT};
use crate::calendar;

type Message = Record<Vec<u8>>;

/// A row group has so many rows, and about so many bytes of payloads, at most: they are held in memory.
const ROWS: usize = 20_000;
const BYTES: usize = 32 * 1024 * 1024;
/// Where the metadata says what stream a file is from.
const EXPORT: &str = "sqlstreams.export";
const COLUMNS: [&str; 7] =
    ["id", "key", "routing_key", "headers", "produced_at", "expires_at", "payload"];

/// A file that is being written.
pub(crate) struct Writer<W: Write + Send> {
    writer: SerializedFileWriter<W>,
    rows: Vec<Message>,
    bytes: usize,
}

impl<W: Write + Send> Writer<W> {
    pub(crate) fn new(target: W, about: &About, payload_type: PayloadType) -> Result<Self> {
        let payload = match payload_type {
            PayloadType::Json | PayloadType::Jsonb => " (JSON)",
            PayloadType::Text => " (UTF8)",
            _ => "",
        };
        let schema = format!(
            "message messages {{
                REQUIRED INT64 id;
                OPTIONAL BYTE_ARRAY key (UTF8);
                OPTIONAL BYTE_ARRAY routing_key (UTF8);
                OPTIONAL BYTE_ARRAY headers (JSON);
                REQUIRED INT64 produced_at (TIMESTAMP_MICROS);
                OPTIONAL INT64 expires_at (TIMESTAMP_MICROS);
                OPTIONAL BYTE_ARRAY payload{payload};
            }}"
        );
        let schema = Arc::new(parse_message_type(&schema)?);
        let about = serde_json::to_string(about).map_err(|e| ParquetError::External(e.into()))?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_created_by(concat!("sqlstreams ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_key_value_metadata(Some(vec![KeyValue::new(EXPORT.to_owned(), about)]))
            .build();
        let writer = SerializedFileWriter::new(target, schema, Arc::new(properties))?;
        Ok(Self { writer, rows: Vec::new(), bytes: 0 })
    }

    pub(crate) fn write(&mut self, message: Message) -> Result<()> {
        self.bytes += message.payload.as_ref().map_or(0, Vec::len);
        self.rows.push(message);
        match self.rows.len() >= ROWS || self.bytes >= BYTES {
            true => self.write_group(),
            false => Ok(()),
        }
    }

    /// Writes the rest and the footer, without which it is no file.
    pub(crate) fn finish(mut self) -> Result<W> {
        self.write_group()?;
        self.writer.into_inner()
    }

    fn write_group(&mut self) -> Result<()> {
        let rows = std::mem::take(&mut self.rows);
        self.bytes = 0;
        if rows.is_empty() {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        let text = |text: &Option<String>| text.as_deref().map(ByteArray::from);
        column::<Int64Type, _>(&mut group, rows.iter().map(|m| Some(m.id)), false)?;
        column::<ByteArrayType, _>(&mut group, rows.iter().map(|m| text(&m.key)), true)?;
        column::<ByteArrayType, _>(&mut group, rows.iter().map(|m| text(&m.routing_key)), true)?;
        column::<ByteArrayType, _>(&mut group, rows.iter().map(|m| text(&m.headers)), true)?;
        let produced_at = rows.iter().map(|m| to_micros(m.produced_at).map(Some));
        let produced_at = produced_at.collect::<Result<Vec<_>>>()?;
        column::<Int64Type, _>(&mut group, produced_at.into_iter(), false)?;
        let expires_at = rows.iter().map(|m| m.expires_at.map(to_micros).transpose());
        let expires_at = expires_at.collect::<Result<Vec<_>>>()?;
        column::<Int64Type, _>(&mut group, expires_at.into_iter(), true)?;
        let payloads = rows.iter().map(|m| m.payload.clone().map(ByteArray::from));
        column::<ByteArrayType, _>(&mut group, payloads, true)?;
        group.close()?;
        Ok(())
    }
}

/// Writes the next column of a row group.
fn column<T: DataType, W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    cells: impl Iterator<Item = Option<T::T>>,
    optional: bool,
) -> Result<()> {
    let missing = || ParquetError::General("there is no such column".to_owned());
    let mut writer = group.next_column()?.ok_or_else(missing)?;
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    for cell in cells {
        levels.push(i16::from(cell.is_some()));
        values.extend(cell);
    }
    let levels = optional.then_some(levels.as_slice());
    writer.typed::<T>().write_batch(&values, levels, None)?;
    writer.close()
}

/// A file that is being read.
pub(crate) struct Reader {
    reader: SerializedFileReader<File>,
    /// By the place in [`COLUMNS`]: which of the file's columns it is.
    places: [Option<usize>; 7],
    group: usize,
    /// Of the row group that is being read.
    open: Option<Group>,
}

struct Group {
    left: usize,
    columns: Vec<Option<Cells>>,
}

enum Cells {
    Numbers(ColumnReaderImpl<Int64Type>, i16),
    Bytes(ColumnReaderImpl<ByteArrayType>, i16),
}

/// What Parquet files begin with.
pub(crate) const MAGIC: [u8; 4] = *b"PAR1";

/// Whether a file begins so.
pub(crate) fn is_parquet(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == MAGIC
}

impl Reader {
    pub(crate) fn open(file: File) -> Result<Self> {
        let reader = SerializedFileReader::new(file)?;
        let schema = reader.metadata().file_metadata().schema_descr_ptr();
        let mut places = [None; 7];
        for (name, place) in COLUMNS.iter().zip(&mut places) {
            *place = schema.columns().iter().position(|column| column.path().string() == *name);
            let Some(column) = place.map(|at| schema.column(at)) else {
                if ["id", "produced_at", "payload"].contains(name) {
                    return Err(ParquetError::General(format!("it has no column {name}")));
                }
                continue;
            };
            let is_time = name.ends_with("_at");
            let wanted =
                if is_time || *name == "id" { Physical::INT64 } else { Physical::BYTE_ARRAY };
            let is_micros = column.converted_type() == ConvertedType::TIMESTAMP_MICROS;
            if column.physical_type() != wanted
                || column.max_rep_level() > 0
                || is_time && !is_micros
            {
                let kind = if is_time { "times in microseconds" } else { "what it should have" };
                return Err(ParquetError::General(format!("column {name} does not hold {kind}")));
            }
        }
        Ok(Self { reader, places, group: 0, open: None })
    }

    /// What stream it is from, if it says so.
    pub(crate) fn about(&self) -> Result<Option<About>> {
        let metadata = self.reader.metadata().file_metadata().key_value_metadata();
        let about = metadata.into_iter().flatten().find(|pair| pair.key == EXPORT);
        let Some(text) = about.and_then(|pair| pair.value.as_deref()) else { return Ok(None) };
        let about: About = serde_json::from_str(text)
            .map_err(|e| ParquetError::General(format!("its metadata {EXPORT} is odd: {e}")))?;
        match about.format <= FORMAT {
            true => Ok(Some(about)),
            false => {
                let text = format!("it has format {}, later than {FORMAT}", about.format);
                Err(ParquetError::General(text))
            }
        }
    }

    /// How many rows it has.
    pub(crate) fn rows(&self) -> u64 {
        u64::try_from(self.reader.metadata().file_metadata().num_rows()).unwrap_or_default()
    }

    /// The next messages, at most so many; none at the end.
    pub(crate) fn next(&mut self, most: usize) -> Result<Vec<Message>> {
        loop {
            if let Some(group) = self.open.as_mut().filter(|group| group.left > 0) {
                let count = most.min(group.left);
                let rows = group.next(count)?;
                group.left -= count;
                return Ok(rows);
            }
            if self.group == self.reader.metadata().num_row_groups() {
                return Ok(Vec::new());
            }
            let group = self.reader.get_row_group(self.group)?;
            self.group += 1;
            self.open = Some(Group::open(group.as_ref(), &self.places)?);
        }
    }
}

impl Group {
    fn open(group: &dyn RowGroupReader, places: &[Option<usize>; 7]) -> Result<Self> {
        let cells = |place: &Option<usize>| {
            let Some(place) = *place else { return Ok(None) };
            let levels = group.metadata().column(place).column_descr().max_def_level();
            Ok(Some(match group.get_column_reader(place)? {
                reader @ ColumnReader::Int64ColumnReader(_) => {
                    Cells::Numbers(get_typed_column_reader(reader), levels)
                }
                reader => Cells::Bytes(get_typed_column_reader(reader), levels),
            }))
        };
        Ok(Self {
            left: usize::try_from(group.metadata().num_rows()).unwrap_or_default(),
            columns: places.iter().map(cells).collect::<Result<_>>()?,
        })
    }

    fn next(&mut self, count: usize) -> Result<Vec<Message>> {
        let ids = self.numbers(0, count)?;
        let mut keys = self.texts(1, count)?;
        let mut routing_keys = self.texts(2, count)?;
        let mut headers = self.texts(3, count)?;
        let produced_at = self.numbers(4, count)?;
        let expires_at = self.numbers(5, count)?;
        let mut payloads = self.bytes(6, count)?;
        let null = |name| ParquetError::General(format!("{name} is null"));
        (0..count)
            .map(|at| {
                let id = ids[at].ok_or_else(|| null("id"))?;
                let produced_at = produced_at[at].ok_or_else(|| null("produced_at"))?;
                let mut message = Record::new(id, from_micros(produced_at), payloads[at].take());
                message.key = keys[at].take();
                message.routing_key = routing_keys[at].take();
                message.headers = headers[at].take();
                message.expires_at = expires_at[at].map(from_micros);
                Ok(message)
            })
            .collect()
    }

    fn numbers(&mut self, column: usize, count: usize) -> Result<Vec<Option<i64>>> {
        match &mut self.columns[column] {
            Some(Cells::Numbers(reader, levels)) => read(reader, *levels, count),
            _ => Ok(vec![None; count]),
        }
    }

    fn bytes(&mut self, column: usize, count: usize) -> Result<Vec<Option<Vec<u8>>>> {
        match &mut self.columns[column] {
            Some(Cells::Bytes(reader, levels)) => {
                let cells = read(reader, *levels, count)?;
                Ok(cells.into_iter().map(|cell| cell.map(|bytes| bytes.data().to_vec())).collect())
            }
            _ => Ok(vec![None; count]),
        }
    }

    fn texts(&mut self, column: usize, count: usize) -> Result<Vec<Option<String>>> {
        let text = |bytes| {
            String::from_utf8(bytes)
                .map_err(|_| ParquetError::General(format!("{} is not UTF-8", COLUMNS[column])))
        };
        let cells = self.bytes(column, count)?;
        cells.into_iter().map(|cell| cell.map(text).transpose()).collect()
    }
}

/// Exactly `count` cells of a column, of which those are there that have the highest level.
fn read<T: DataType>(
    reader: &mut ColumnReaderImpl<T>,
    highest: i16,
    count: usize,
) -> Result<Vec<Option<T::T>>> {
    let (mut values, mut levels) = (Vec::new(), Vec::new());
    let mut rows = 0;
    while rows < count {
        let wanted = if highest > 0 { Some(&mut levels) } else { None };
        let (more, _, _) = reader.read_records(count - rows, wanted, None, &mut values)?;
        if more == 0 {
            return Err(ParquetError::General("a column is shorter than the others".to_owned()));
        }
        rows += more;
    }
    if highest == 0 {
        return Ok(values.into_iter().map(Some).collect());
    }
    let mut values = values.into_iter();
    Ok(levels
        .into_iter()
        .map(|level| if level == highest { values.next() } else { None })
        .collect())
}

/// What is written for -infinity, as DuckDB does.
const BEFORE_ALL: i64 = -i64::MAX;

/// Microseconds since 1970; PostgreSQL's infinities are the last ones. Its calendar counts from 2000, and so goes on for 30 years longer.
fn to_micros(at: SystemTime) -> Result<i64> {
    if at >= calendar::infinity() {
        return Ok(i64::MAX);
    } else if at <= calendar::before_all() {
        return Ok(BEFORE_ALL);
    }
    let micros = match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_micros()).ok().filter(|us| *us < i64::MAX),
        Err(before) => i64::try_from(before.duration().as_micros()).ok().map(|us| -us),
    };
    micros.ok_or_else(|| {
        let text = format!("{} is beyond the times of Parquet", calendar::text(at, 0));
        ParquetError::General(text)
    })
}

fn from_micros(micros: i64) -> SystemTime {
    let offset = Duration::from_micros(micros.unsigned_abs());
    match micros {
        i64::MAX => calendar::infinity(),
        ..=BEFORE_ALL => calendar::before_all(),
        0.. => SystemTime::UNIX_EPOCH + offset,
        _ => SystemTime::UNIX_EPOCH - offset,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_messages_and_nothing_is_lost() {
        let about = About {
            format: FORMAT,
            stream: "s".to_owned(),
            payload_type: "bytea".to_owned(),
            compacted: true,
            partition_size: 1000,
            after: 0,
            upto: 99_999,
        };
        let mut messages = Vec::new();
        for n in 0..ROWS as i64 * 2 + 17 {
            let at = from_micros(n * 1_000_003 - 5_000_000);
            let payload = (n % 7 != 0).then(|| vec![n as u8; (n % 50) as usize]);
            let mut message = Record::new(n * 2 + 1, at, payload);
            message.key = (n % 3 > 0).then(|| format!("ké{n}"));
            message.routing_key = (n % 5 > 0).then(|| "a.b".to_owned());
            message.headers = (n % 4 > 0).then(|| "{\"n\": 1.10}".to_owned());
            message.expires_at = match n % 3 {
                0 => None,
                1 => Some(calendar::infinity()),
                _ => Some(from_micros(n)),
            };
            messages.push(message);
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = Writer::new(file.reopen().unwrap(), &about, PayloadType::Bytea).unwrap();
        for message in messages.clone() {
            writer.write(message).unwrap();
        }
        writer.finish().unwrap();
        assert!(is_parquet(file.path()));
        let mut reader = Reader::open(file.reopen().unwrap()).unwrap();
        assert_eq!(reader.about().unwrap(), Some(about));
        assert_eq!(reader.rows(), messages.len() as u64);
        let mut read = Vec::new();
        loop {
            let rows = reader.next(777).unwrap();
            if rows.is_empty() {
                break;
            }
            read.extend(rows);
        }
        assert!(read == messages);
    }

    #[test]
    fn times_go_there_and_back() {
        for micros in [0, 1, -1, i64::MAX, i64::MAX - 1, -210_866_803_200_000_000] {
            assert_eq!(to_micros(from_micros(micros)).unwrap(), micros);
        }
        let last = calendar::parse("294276-12-31T23:59:59Z").unwrap();
        assert!(to_micros(last).unwrap_err().to_string().contains("294276-12-31"));
    }
}
