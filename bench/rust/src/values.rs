//! The values of a batch: as bytes, or typed by arrow-json or arrow-avro.

use std::sync::Arc;

use arrow::array::{BinaryBuilder, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use arrow_avro::reader::ReaderBuilder as AvroReader;
use arrow_avro::schema::{AvroSchema, Fingerprint, FingerprintAlgorithm, SchemaStore};
use arrow_json::ReaderBuilder as JsonReader;

use crate::{Outcome, Task};

/// The number of the schema of all records.
const SCHEMA_ID: u32 = 1;

pub enum Values {
    Raw(BinaryBuilder),
    Json(arrow_json::reader::Decoder),
    Avro(arrow_avro::reader::Decoder),
}

impl Values {
    /// `limit` is the largest number of records in a batch.
    pub fn new(task: &Task, limit: usize) -> Outcome<Self> {
        if task.fields.is_empty() {
            return Ok(Self::Raw(BinaryBuilder::with_capacity(limit, limit * 256)));
        }
        if task.format == "avro" {
            let mut store = SchemaStore::new_with_type(FingerprintAlgorithm::Id);
            store.set(Fingerprint::Id(SCHEMA_ID), AvroSchema::new(task.avro_schema.clone()))?;
            let reader = AvroReader::new().with_writer_schema_store(store).with_batch_size(limit);
            return Ok(Self::Avro(reader.with_active_fingerprint(Fingerprint::Id(SCHEMA_ID)).build_decoder()?));
        }
        let fields: Outcome<Vec<_>> = task.fields.iter().map(|(n, t)| Ok(Field::new(n, data_type(t)?, true))).collect();
        let reader = JsonReader::new(Arc::new(Schema::new(fields?))).with_batch_size(limit);
        Ok(Self::Json(reader.build_decoder()?))
    }

    /// Returns the prefix of Kafka's columns next to these.
    pub fn prefix(&self) -> &'static str {
        if matches!(self, Self::Raw(_)) { "" } else { "kafka_" }
    }

    pub fn push(&mut self, value: &[u8]) -> Outcome<()> {
        let read = match self {
            Self::Raw(values) => {
                values.append_value(value);
                value.len()
            }
            Self::Json(decoder) => decoder.decode(value)?,
            Self::Avro(decoder) => decoder.decode(value)?,
        };
        if read < value.len() { Err("a value of more than one record".into()) } else { Ok(()) }
    }

    pub fn finish(&mut self) -> Outcome<RecordBatch> {
        let batch = match self {
            Self::Raw(values) => {
                let schema = Schema::new(vec![Field::new("value", DataType::Binary, true)]);
                Some(RecordBatch::try_new(Arc::new(schema), vec![Arc::new(values.finish())])?)
            }
            Self::Json(decoder) => decoder.flush()?,
            Self::Avro(decoder) => decoder.flush()?,
        };
        batch.ok_or_else(|| "an empty batch".into())
    }
}

fn data_type(name: &str) -> Outcome<DataType> {
    if let Some(digits) = name.strip_prefix("decimal(").and_then(|rest| rest.strip_suffix(')')) {
        let (precision, scale) = digits.split_once(',').ok_or("a decimal has precision and scale")?;
        return Ok(DataType::Decimal128(precision.trim().parse()?, scale.trim().parse()?));
    }
    Ok(match name {
        "string" => DataType::Utf8,
        "int32" => DataType::Int32,
        "int64" => DataType::Int64,
        "float64" => DataType::Float64,
        "bool" => DataType::Boolean,
        "timestamp" => DataType::Timestamp(TimeUnit::Microsecond, Some("+00:00".into())),
        other => return Err(format!("no type {other}").into()),
    })
}
