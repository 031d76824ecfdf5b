//! Kafka's own columns of a batch, as Spark's Kafka source names them.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryBuilder, Int32Array, Int32Builder, Int64Builder, ListBuilder, RecordBatch, StringArray, StringBuilder,
    StructBuilder, TimestampMillisecondBuilder,
};
use arrow::datatypes::{DataType, Field, Fields, Schema};
use rdkafka::message::{BorrowedMessage, Headers, Message};

use crate::Outcome;

pub struct Columns {
    prefix: &'static str,
    topic: StringArray,
    create_time: Int32Array,
    key: BinaryBuilder,
    partition: Int32Builder,
    offset: Int64Builder,
    timestamp: TimestampMillisecondBuilder,
    headers: ListBuilder<StructBuilder>,
    count: usize,
}

impl Columns {
    /// `limit` is the largest number of records in a batch.
    pub fn new(topic: &str, prefix: &'static str, limit: usize) -> Self {
        let header = Fields::from(vec![
            Field::new("key", DataType::Utf8, true),
            Field::new("value", DataType::Binary, true),
        ]);
        Self {
            prefix,
            topic: StringArray::from(vec![topic; limit]),
            create_time: Int32Array::from(vec![0; limit]),
            key: BinaryBuilder::with_capacity(limit, limit * 16),
            partition: Int32Builder::with_capacity(limit),
            offset: Int64Builder::with_capacity(limit),
            timestamp: TimestampMillisecondBuilder::with_capacity(limit).with_timezone("UTC"),
            headers: ListBuilder::new(StructBuilder::from_fields(header, limit / 8)),
            count: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn push(&mut self, message: &BorrowedMessage) -> Outcome<()> {
        self.count += 1;
        self.key.append_option(message.key());
        self.partition.append_value(message.partition());
        self.offset.append_value(message.offset());
        match message.timestamp() {
            rdkafka::Timestamp::CreateTime(ms) => self.timestamp.append_value(ms),
            _ => return Err("a record without its creator's time".into()),
        }
        if let Some(headers) = message.headers() {
            let pairs = self.headers.values();
            for header in headers.iter() {
                pairs.field_builder::<StringBuilder>(0).ok_or("header keys")?.append_value(header.key);
                pairs.field_builder::<BinaryBuilder>(1).ok_or("header values")?.append_option(header.value);
                pairs.append(true);
            }
        }
        self.headers.append(true);
        Ok(())
    }

    /// Returns the batch: the columns of the values, then Kafka's.
    pub fn finish(&mut self, values: RecordBatch) -> Outcome<RecordBatch> {
        let own: [(&str, ArrayRef); 7] = [
            ("key", Arc::new(self.key.finish())),
            ("topic", Arc::new(self.topic.slice(0, self.count))),
            ("partition", Arc::new(self.partition.finish())),
            ("offset", Arc::new(self.offset.finish())),
            ("timestamp", Arc::new(self.timestamp.finish())),
            ("timestampType", Arc::new(self.create_time.slice(0, self.count))),
            ("headers", Arc::new(self.headers.finish())),
        ];
        self.count = 0;
        let mut fields: Vec<_> = values.schema().fields().iter().cloned().collect();
        let mut arrays = values.columns().to_vec();
        for (name, array) in own {
            fields.push(Arc::new(Field::new(format!("{}{name}", self.prefix), array.data_type().clone(), true)));
            arrays.push(array);
        }
        Ok(RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays)?)
    }
}
