//! Upgrades, from what was released (tests/released): with data, with traffic of old programs, interrupted, by many at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sqlstreams::{Client, Delivery, Outcome};
use tokio_postgres::SimpleQueryMessage;

use crate::support::{connect, count, database};

type Db = tokio_postgres::Client;

/// The oldest version whose programs may still run beside those of today.
const INSTALLATION: &str = include_str!("../released/1/installation.sql");
const STATEMENTS: &str = include_str!("../released/1/statements.sql");

/// A database with that version.
async fn released() -> (String, Db) {
    let url = database().await;
    let db = connect(&url).await;
    let install = format!(
        "SET client_min_messages = warning; CREATE SCHEMA sqlstreams; SET search_path = sqlstreams, pg_temp; {INSTALLATION}; RESET search_path"
    );
    db.batch_execute(&install).await.unwrap();
    (url, db)
}

/// A connection of an old program, for a stream that is not compacted.
async fn old_program(url: &str) -> Db {
    let db = connect(url).await;
    let of_compacted = ["PREPARE \"latest\"", "PREPARE \"current\""];
    let others =
        STATEMENTS.split("\n\n").filter(|s| !of_compacted.iter().any(|c| s.starts_with(c)));
    db.batch_execute(&others.collect::<Vec<_>>().join("\n")).await.unwrap();
    db
}

/// The rows of a statement, as text.
async fn rows(db: &Db, sql: &str) -> Vec<Vec<Option<String>>> {
    let answer = db.simple_query(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    let rows = answer.into_iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => {
            Some((0..row.len()).map(|i| row.get(i).map(str::to_owned)).collect())
        }
        _ => None,
    });
    rows.collect()
}

/// Produces one message after the other, as programs of the released version do, until it is told to stop; returns how many.
async fn produce(db: Db, stop: Arc<AtomicBool>) -> i64 {
    let mut sent = 0;
    while !stop.load(Ordering::SeqCst) {
        let insert = format!("EXECUTE \"insert\" (NULL, NULL, NULL, ARRAY['{sent}'::json])");
        assert_eq!(rows(&db, &insert).await.len(), 1);
        sent += 1;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    sent
}

/// Consumes as programs of the released version do. One message in ten fails. Returns what did not.
async fn consume(db: Db, group: i64, stop: Arc<AtomicBool>) -> BTreeSet<i64> {
    let mut handled = BTreeSet::new();
    let mut settled = ["'{}', '{}', '{}'".to_owned(), "'{}', '{}', '{}', '{}', '{}'".to_owned()];
    loop {
        let last = stop.load(Ordering::SeqCst);
        let (limit, token) = (if last { 0 } else { 20 }, uuid::Uuid::new_v4());
        let [done, failed] = &settled;
        let advance = format!(
            "EXECUTE \"advance\" (1, {group}, {done}, {failed}, {limit}, '{token}', NULL, NULL, -1, 0, NULL)"
        );
        let claimed = rows(&db, &advance).await.remove(0);
        assert_eq!(claimed[0].as_deref(), Some("{}"), "a lease was lost");
        if last {
            return handled;
        }
        settled = ["'{}', '{}', '{}'".to_owned(), "'{}', '{}', '{}', '{}', '{}'".to_owned()];
        let Some(seq) = &claimed[1] else {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        };
        let fetch = format!("EXECUTE \"fetch\" (1, {group}, '{token}', 0, 20, 1000000)");
        let ids = rows(&db, &fetch)
            .await
            .into_iter()
            .map(|row| row[0].as_deref().unwrap().parse::<i64>().unwrap());
        let (fail, succeed): (Vec<i64>, Vec<i64>) = ids.partition(|id: &i64| id % 10 == 0);
        for id in succeed {
            assert!(handled.insert(id), "{id} came twice");
        }
        let list = |one: &str| vec![one; fail.len()].join(",");
        settled = [
            format!("'{{{seq}}}', '{{{token}}}', '{{\"{{(,)}}\"}}'"),
            format!(
                "'{{{}}}', '{{{}}}', '{{{}}}', '{{{}}}', '{{{}}}'",
                list(&token.to_string()),
                fail.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
                list("retry"),
                list("no"),
                list("0")
            ),
        ];
    }
}

/// Old programs go on while a new one brings the schema to its version, and after it; nobody locks the log, and nothing is lost or
/// handled twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tb_110_old_programs_go_on_while_a_new_one_upgrades() {
    let (url, db) = released().await;
    db.batch_execute("SELECT sqlstreams.create_stream('s', p_partition_size => 1000); SELECT sqlstreams.create_group(1, 'g')").await.unwrap();
    for n in 2..30 {
        db.batch_execute(&format!("SELECT sqlstreams.create_stream('s{n}')")).await.unwrap();
    }
    let stop = Arc::new(AtomicBool::new(false));
    let producing = tokio::spawn(produce(old_program(&url).await, stop.clone()));
    let consuming = tokio::spawn(consume(old_program(&url).await, 1, stop.clone()));
    let watching = tokio::spawn(watch_locks(connect(&url).await, stop.clone()));
    let head = "SELECT last_value FROM sqlstreams.message_log_1_id_seq";
    let reaches = async |more: i64| {
        let from = count(&db, head).await;
        crate::support::until("messages flow", Duration::from_secs(60), async || {
            count(&db, head).await >= from + more
        })
        .await;
    };
    reaches(300).await;
    let client = Client::connect(&url).await.unwrap();
    reaches(300).await;
    // And new programs join in.
    let stream = client.stream::<i64>("s").open().await.unwrap();
    stream.producer().send(&-1).await.unwrap();
    stop.store(true, Ordering::SeqCst);
    let sent = producing.await.unwrap() + 1;
    let mut handled = consuming.await.unwrap();
    for (table, longest) in watching.await.unwrap() {
        println!("{table} was locked for {longest:?}");
        assert!(!table.contains("message_log"), "the log was locked");
        // Waiting for it ends after 200 ms; the rest is for a machine that is busy.
        assert!(longest < Duration::from_secs(1), "{table} was locked for {longest:?}");
    }

    let replaced = "SELECT count(*) FROM pg_proc WHERE proname LIKE 'replaced\\_%'";
    assert_eq!(count(&db, replaced).await, 0, "what nobody calls any more is dropped");

    let by_new = Arc::new(std::sync::Mutex::new(Vec::new()));
    let notes = by_new.clone();
    let group = stream.group("g").open().await.unwrap();
    group
        .consumer()
        .until_caught_up()
        .run(move |message: Delivery<i64>| {
            notes.lock().unwrap().push(message.id);
            async { Outcome::Done }
        })
        .await
        .unwrap();
    for id in by_new.lock().unwrap().drain(..) {
        assert!(handled.insert(id), "{id} came twice");
    }
    let log = db.query("SELECT id FROM sqlstreams.message_log_1", &[]).await.unwrap();
    let log: BTreeSet<i64> = log.iter().map(|row| row.get(0)).collect();
    assert_eq!(log.len() as i64, sent);
    assert!(log == handled, "{} messages, {} handled", log.len(), handled.len());
}

/// For how long ACCESS EXCLUSIVE locks on tables of traffic were seen, held or waited for.
async fn watch_locks(db: Db, stop: Arc<AtomicBool>) -> BTreeMap<String, Duration> {
    let mut seen: BTreeMap<(String, i32), (Instant, Instant)> = BTreeMap::new();
    let sql = "SELECT relation::regclass::text, pid FROM pg_locks JOIN pg_class AS c ON c.oid = relation
               WHERE mode = 'AccessExclusiveLock' AND c.relkind IN ('r', 'p')
                 AND relname ~ '^(message_log|consumer_group_cursor|consumer_lease|exception_queue|consumer_done)_1(_|$)'";
    while !stop.load(Ordering::SeqCst) {
        for row in db.query(sql, &[]).await.unwrap() {
            let now = Instant::now();
            seen.entry((row.get(0), row.get(1))).or_insert((now, now)).1 = now;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    seen.into_iter().map(|((table, _), (first, last))| (table, last - first)).collect()
}

/// What programs in the window send is understood by the schema of today.
#[tokio::test]
async fn statements_of_released_programs_prepare() {
    let url = database().await;
    let client = Client::connect(&url).await.unwrap();
    client.stream::<u64>("s").compacted(true).create().await.unwrap();
    let db = connect(&url).await;
    db.batch_execute(STATEMENTS).await.unwrap();
    let statements = STATEMENTS.matches("PREPARE ").count() as i64;
    assert!(statements > 50);
    assert_eq!(
        count(&db, "SELECT count(*) FROM pg_prepared_statements WHERE from_sql").await,
        statements
    );
}

/// What is there, in every detail that matters, but for numbers of objects and the order of columns.
async fn everything(db: &Db) -> BTreeSet<String> {
    let sql = "
        SELECT format('column %s.%s %s %s %s', table_name, column_name, udt_name, is_nullable, coalesce(column_default, generation_expression, identity_generation)) FROM information_schema.columns WHERE table_schema = 'sqlstreams'
        UNION ALL SELECT format('constraint %s %s %s', conrelid::regclass, conname, pg_get_constraintdef(oid)) FROM pg_constraint WHERE connamespace = 'sqlstreams'::regnamespace AND conrelid <> 0
        UNION ALL SELECT 'index ' || indexdef FROM pg_indexes WHERE schemaname = 'sqlstreams'
        UNION ALL SELECT format('function %s %s', oid::regprocedure, md5(pg_get_functiondef(oid))) FROM pg_proc WHERE pronamespace = 'sqlstreams'::regnamespace AND proname NOT LIKE 'replaced\\_%'
        UNION ALL SELECT format('trigger %s %s %s', tgrelid::regclass, tgname, tgenabled) FROM pg_trigger WHERE NOT tgisinternal
        UNION ALL SELECT format('view %s %s', viewname, md5(definition)) FROM pg_views WHERE schemaname = 'sqlstreams'
        UNION ALL SELECT format('table %s %s %s', relname, relkind, reloptions) FROM pg_class WHERE relnamespace = 'sqlstreams'::regnamespace AND relkind <> 'c'
        UNION ALL SELECT format('type %s %s', typname, (SELECT string_agg(attname || ' ' || atttypid::regtype, ',' ORDER BY attnum) FROM pg_attribute WHERE attrelid = typrelid)) FROM pg_type JOIN pg_class ON pg_class.oid = typrelid WHERE typnamespace = 'sqlstreams'::regnamespace AND relkind = 'c'
        UNION ALL SELECT format('version %s %s %s %s', version, oldest, name, finished_at IS NOT NULL) FROM sqlstreams.schema_migration";
    db.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// However often and wherever an upgrade is killed, and however many run at once, in the end the schema is as if it had been
/// installed today.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_upgrade_that_is_killed_is_finished_by_the_next() {
    let make = async |db: &Db| {
        for n in 1..=12 {
            let make = format!(
                "SELECT sqlstreams.create_stream('s{n}', p_compacted => {}); SELECT sqlstreams.create_group({n}, 'g')",
                n % 3 == 0
            );
            db.batch_execute(&make).await.unwrap();
        }
    };
    let fresh = database().await;
    Client::connect(&fresh).await.unwrap();
    let fresh = connect(&fresh).await;
    make(&fresh).await;
    let expected = everything(&fresh).await;

    let mut kills = 0;
    while kills < 5 {
        let (url, db) = released().await;
        make(&db).await;
        kills += kill_upgrades(&url, &db).await;
        Client::connect(&url).await.unwrap();
        let found = everything(&db).await;
        let missing: Vec<_> = expected.difference(&found).collect();
        let surplus: Vec<_> = found.difference(&expected).collect();
        assert!(
            missing.is_empty() && surplus.is_empty(),
            "missing: {missing:#?}, surplus: {surplus:#?}"
        );
    }
}

/// Whoever finishes it says from where it came, not how far the other was.
#[tokio::test]
async fn an_upgrade_that_was_interrupted_is_told_from_its_beginning() {
    let (url, db) = released().await;
    db.batch_execute("SELECT sqlstreams.create_stream('s')").await.unwrap();
    // What there is once is made, and then the stream cannot follow.
    db.batch_execute(
        "CREATE FUNCTION stop() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
             IF EXISTS (SELECT FROM sqlstreams.schema_migration WHERE version > 1) THEN RAISE EXCEPTION 'no more tables'; END IF;
         END $$;
         CREATE EVENT TRIGGER stop ON ddl_command_start WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION stop()",
    )
    .await
    .unwrap();
    let error = Client::connect(&url).await.map(drop).unwrap_err();
    assert!(error.to_string().contains("no more tables"), "{error}");
    let whole = "SELECT count(*) FROM sqlstreams.schema_migration WHERE finished_at IS NULL AND version > 1";
    assert_eq!(count(&db, whole).await, 1, "it was not interrupted");
    db.batch_execute("DROP EVENT TRIGGER stop").await.unwrap();
    let (client, report) = Client::builder(&url).connect_and_migrate().await.unwrap();
    assert_eq!((report.from, report.changed), (Some(1), true), "{report:?}");
    let again = client.migrate().await.unwrap();
    assert_eq!((again.from, again.changed), (Some(again.to), false), "{again:?}");
}

/// Lets one to three programs upgrade, and kills what they do at some moment, until one gets through. Returns how many were killed.
async fn kill_upgrades(url: &str, db: &Db) -> i64 {
    let mut kills = 0;
    for round in 0.. {
        let migrating: Vec<_> = (0..1 + round % 3)
            .map(|_| {
                let url = url.to_owned();
                tokio::spawn(async move { Client::connect(&url).await })
            })
            .collect();
        // Ever later, so that it comes to its end, however slow the machine is.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(5..15) + 6 * round)).await;
        kills += count(db, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'").await;
        let mut done = 0;
        for one in migrating {
            done += i32::from(one.await.unwrap().is_ok());
        }
        if done > 0 {
            break;
        }
    }
    kills
}

/// The owner of a database that is nothing else: no superuser, and with nothing outside its schema.
#[tokio::test]
async fn tb_113_an_owner_without_other_privileges_installs_and_upgrades() {
    let url = database().await;
    let db = connect(&url).await;
    let password = url.split(['@', ':']).nth(2).unwrap();
    // Roles are the cluster's, which other tests share.
    let role = format!("owner_{}", url.rsplit('/').next().unwrap());
    db.batch_execute(&format!(
        "CREATE ROLE {role} LOGIN PASSWORD '{password}';
         REVOKE ALL ON SCHEMA public FROM PUBLIC; CREATE SCHEMA sqlstreams AUTHORIZATION {role}; SET ROLE {role}; SET search_path = sqlstreams, pg_temp;
         {INSTALLATION}; RESET ROLE; CREATE ROLE {role}_reader; GRANT USAGE ON SCHEMA sqlstreams TO {role}_reader"
    ))
    .await
    .unwrap();
    let owned = url.replace("//postgres:", &format!("//{role}:"));
    connect(&owned)
        .await
        .batch_execute(
            "SELECT sqlstreams.create_stream('s'); SELECT sqlstreams.create_group(1, 'g')",
        )
        .await
        .unwrap();
    let grant = format!(
        "GRANT SELECT ON ALL TABLES IN SCHEMA sqlstreams TO {role}_reader; GRANT SELECT ON ALL SEQUENCES IN SCHEMA sqlstreams TO {role}_reader"
    );
    db.batch_execute(&grant).await.unwrap();
    let client = Client::connect(&owned).await.unwrap();
    let stream = client.stream::<u64>("s").open().await.unwrap();
    stream.producer().send(&1).await.unwrap();
    let consumed = stream.group("g").open().await.unwrap().consumer().until_caught_up();
    assert_eq!(consumed.run(async |_: Delivery<u64>| {}).await.unwrap().handled, 1);
    client.maintenance().once().await.unwrap();
    assert_eq!(client.maintenance().status().await.unwrap().failures, []);
    // Who could read the view before still can.
    db.batch_execute(&format!(
        "SET ROLE {role}_reader; SELECT * FROM sqlstreams.consumer_group_cursor"
    ))
    .await
    .unwrap();
}

/// Whoever could consume before can afterwards, and nobody else; also where functions are nobody's by default. Any name of a schema will do.
#[tokio::test]
async fn privileges_are_those_of_before() {
    for (schema, mine) in [("We ird", false), ("sqlstreams", true)] {
        let url = database().await;
        let db = connect(&url).await;
        let password = url.split(['@', ':']).nth(2).unwrap();
        let role = format!("app_{}", url.rsplit('/').next().unwrap());
        let other = format!("{role}_other");
        db.batch_execute(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD '{password}'; CREATE ROLE {other};
             CREATE SCHEMA \"{schema}\"; SET search_path = \"{schema}\", pg_temp; {INSTALLATION};
             SELECT create_stream('s'); SELECT create_group(1, 'g');
             INSERT INTO message_log_1 (payload) VALUES ('1'), ('2');
             GRANT USAGE ON SCHEMA \"{schema}\" TO {role}, {other};
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA \"{schema}\" TO {role}; GRANT ALL ON ALL SEQUENCES IN SCHEMA \"{schema}\" TO {role};
             REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA \"{schema}\" FROM PUBLIC; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA \"{schema}\" TO {role};
             CREATE VIEW own AS SELECT * FROM list_cursors();"
        ))
        .await
        .unwrap();
        if mine {
            db.batch_execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
                .await
                .unwrap();
        }
        Client::builder(&url).schema(schema).connect().await.unwrap();
        assert_eq!(
            count(&db, "SELECT count(*) FROM own").await,
            1,
            "what somebody made of a function stays"
        );
        let public = format!(
            "SELECT count(*) FROM pg_proc WHERE pronamespace = '\"{schema}\"'::regnamespace AND has_function_privilege('{other}', oid, 'EXECUTE')"
        );
        assert_eq!(count(&db, &public).await, 0);
        let app = Client::builder(&url.replace("//postgres:", &format!("//{role}:")))
            .schema(schema)
            .migrate(false);
        let client = app.connect().await.unwrap();
        let stream = client.stream::<u64>("s").open().await.unwrap();
        let group = stream.group("g").open().await.unwrap();
        let consumed = group.consumer().until_caught_up();
        let consumed = consumed.run(async |message: Delivery<u64>| match message.attempt() {
            1 if message.payload == 1 => Outcome::RetryAfter("once".into(), Duration::ZERO),
            _ => Outcome::Done,
        });
        assert_eq!(consumed.await.unwrap().handled, 2);
        assert_eq!(group.status().await.unwrap().lag, 0);
        assert_eq!(client.streams().await.unwrap().len(), 1);
        let doctor = Client::builder(&url).schema(schema).doctor().await.unwrap();
        assert_eq!(doctor.look().await.unwrap(), []);
    }
}
