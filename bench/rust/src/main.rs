//! Lands a Kafka topic as Parquet, as a competent program with stock crates does: a thread for each core, each with a
//! librdkafka consumer of its share of the partitions, arrow-json or arrow-avro, and parquet's writer.
//!
//! `bench-land OUT` reads the task as JSON from standard input and writes a file for each thread below `OUT`. It keeps
//! no offsets and repeats nothing; any error ends it.

mod columns;
mod values;

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use parquet::schema::types::ColumnPath;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::Message;
use serde::Deserialize;

use crate::columns::Columns;
use crate::values::Values;

pub type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// Records of a batch of columns, and of a row group.
const BATCH: usize = 16_384;
const ROW_GROUP: usize = 1_000_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// What to land. `ends` has the end of each partition; `schema` types the values, in the order of `fields`.
#[derive(Deserialize)]
pub struct Task {
    bootstrap: String,
    topic: String,
    ends: BTreeMap<i32, i64>,
    cores: usize,
    fields: Vec<(String, String)>,
    format: String,
    avro_schema: String,
}

fn main() -> Outcome<()> {
    let out = PathBuf::from(std::env::args().nth(1).ok_or("usage: bench-land OUT < TASK")?);
    let task: Task = serde_json::from_reader(std::io::stdin())?;
    std::fs::create_dir_all(&out)?;
    let partitions: Vec<(i32, i64)> = task.ends.iter().map(|(p, end)| (*p, *end)).filter(|(_, end)| *end > 0).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..task.cores.min(partitions.len()))
            .map(|i| {
                let share: Vec<_> = partitions.iter().skip(i).step_by(task.cores).copied().collect();
                let (task, path) = (&task, out.join(format!("part-{i}.parquet")));
                scope.spawn(move || land(task, &share, &path))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread failed")?)
    })
}

/// Lands the partitions, from offset 0 to their ends, as one file.
fn land(task: &Task, share: &[(i32, i64)], path: &Path) -> Outcome<()> {
    let consumer = consumer(task, share)?;
    let mut values = Values::new(task, BATCH)?;
    let mut columns = Columns::new(&task.topic, values.prefix(), BATCH);
    let mut writer: Option<ArrowWriter<File>> = None;
    let mut pending: BTreeMap<i32, i64> = share.iter().copied().collect();
    while !pending.is_empty() {
        let message = consumer.poll(PATIENCE).ok_or("nothing came for a minute")??;
        values.push(message.payload().ok_or("a record without a value")?)?;
        columns.push(&message)?;
        if pending.get(&message.partition()) == Some(&(message.offset() + 1)) {
            pending.remove(&message.partition());
        }
        if columns.len() == BATCH || pending.is_empty() {
            let batch = columns.finish(values.finish()?)?;
            if writer.is_none() {
                writer = Some(ArrowWriter::try_new(File::create(path)?, batch.schema(), Some(properties()))?);
            }
            writer.as_mut().ok_or("no writer")?.write(&batch)?;
        }
    }
    writer.ok_or("no records")?.close()?;
    Ok(())
}

fn consumer(task: &Task, share: &[(i32, i64)]) -> Outcome<BaseConsumer> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", &task.bootstrap)
        .set("group.id", "bench")
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("check.crcs", "true")
        .set("queued.min.messages", "1000000")
        .set("queued.max.messages.kbytes", "262144")
        .set("fetch.message.max.bytes", "8388608")
        .create()?;
    let mut assigned = TopicPartitionList::new();
    for (partition, _) in share {
        assigned.add_partition_offset(&task.topic, *partition, Offset::Beginning)?;
    }
    consumer.assign(&assigned)?;
    Ok(consumer)
}

fn properties() -> WriterProperties {
    let mut builder = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(1).expect("a level")))
        .set_max_row_group_row_count(Some(ROW_GROUP));
    // Values that never repeat gain nothing from a dictionary.
    for column in ["value", "offset", "timestamp", "kafka_offset", "kafka_timestamp", "order_id", "ts"] {
        builder = builder.set_column_dictionary_enabled(ColumnPath::from(column), false);
    }
    builder.build()
}
