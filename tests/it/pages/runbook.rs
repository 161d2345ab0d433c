//! The pages of `deploy/runbooks/`, and what stands in them for machines: commands, SQL, expressions.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;
use tokio_postgres::NoTls;
use tokio_util::task::TaskTracker;

use super::world::{World, in_short_windows};
use crate::support::fleet::LONG;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Language {
    Shell,
    Sql,
    PromQl,
}

/// One fenced block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) section: String,
    pub(super) language: Language,
    pub(super) text: String,
    pub(super) line: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Page {
    pub(super) slug: String,
    pub(super) text: String,
    pub(super) blocks: Vec<Block>,
}

pub(super) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/runbooks")
}

/// Every page but the list of them.
pub(super) fn pages() -> Vec<Page> {
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut slugs: Vec<String> = files
        .map(|file| file.file_stem().unwrap().to_str().unwrap().to_owned())
        .filter(|slug| slug != "README")
        .collect();
    slugs.sort();
    slugs.iter().map(|slug| page(slug)).collect()
}

pub(super) fn page(slug: &str) -> Page {
    let text = fs::read_to_string(folder().join(format!("{slug}.md"))).unwrap();
    let mut blocks = Vec::new();
    let mut section = String::new();
    let mut open: Option<Block> = None;
    for (number, line) in text.lines().enumerate() {
        if let Some(block) = &mut open {
            if line == "```" {
                blocks.extend(open.take());
            } else {
                block.text += line;
                block.text.push('\n');
            }
        } else if let Some(title) = line.strip_prefix("## ") {
            title.clone_into(&mut section);
        } else if let Some(language) = line.strip_prefix("```") {
            let language = match language {
                "sh" => Language::Shell,
                "sql" => Language::Sql,
                "promql" => Language::PromQl,
                other => panic!("{slug}.md:{}: a block of {other:?}", number + 1),
            };
            let (section, text) = (section.clone(), String::new());
            open = Some(Block { section, language, text, line: number + 2 });
        }
    }
    assert!(open.is_none(), "{slug}.md: a block without end");
    Page { slug: slug.to_owned(), text, blocks }
}

/// Somebody at a page, who knows what to fill in.
pub(super) struct Reader<'w> {
    pub(super) world: &'w World,
    pub(super) page: Page,
    known: BTreeMap<&'static str, String>,
}

impl<'w> Reader<'w> {
    pub(super) fn new(world: &'w World, slug: &str) -> Self {
        let known = BTreeMap::from([("INCIDENT", "INC-1".to_owned())]);
        Self { world, page: page(slug), known }
    }

    pub(super) fn knows(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        self.known.insert(name, value.to_string());
        self
    }

    pub(super) fn learns(&mut self, name: &'static str, value: impl fmt::Display) {
        self.known.insert(name, value.to_string());
    }

    /// Looks: nothing of it may change anything, or answer an error.
    pub(super) async fn diagnoses(&self) {
        for block in self.section("Diagnose") {
            self.runs(&block).await;
        }
    }

    /// Does all that stands under `Act`, in its order.
    pub(super) async fn acts(&self) {
        for block in self.section("Act") {
            self.runs(&block).await;
        }
    }

    /// Does what holds these words, in the order of the page.
    pub(super) async fn does(&self, words: &[&str]) {
        let mut done = 0;
        for block in self.section("Act") {
            if words.iter().any(|words| block.text.contains(words)) {
                self.runs(&block).await;
                done += 1;
            }
        }
        assert!(done >= words.len(), "{}: {words:?}", self.page.slug);
    }

    /// Waits until it is over by what the page says.
    pub(super) async fn verifies(&self) {
        for block in self.section("Verify") {
            if block.language == Language::PromQl {
                let what = self.place(&block);
                let expression = in_short_windows(&block.text);
                self.world.becomes_empty(&what, &expression).await;
            } else {
                self.runs(&block).await;
            }
        }
    }

    fn section(&self, name: &str) -> Vec<Block> {
        let found = self.page.blocks.iter().filter(|block| block.section == name);
        let found: Vec<_> = found.cloned().collect();
        assert!(!found.is_empty(), "{}: nothing under {name}", self.page.slug);
        found
    }

    fn place(&self, block: &Block) -> String {
        format!("deploy/runbooks/{}.md:{}", self.page.slug, block.line)
    }

    /// Runs one block as an operator would.
    pub(super) async fn runs(&self, block: &Block) {
        let place = self.place(block);
        match block.language {
            Language::PromQl => {
                self.world
                    .prometheus
                    .query(&block.text)
                    .await
                    .unwrap_or_else(|e| panic!("{place}: {e}"));
            }
            Language::Sql => self.runs_sql(block, &place).await,
            Language::Shell => self.runs_shell(block, &place).await,
        }
    }

    async fn runs_sql(&self, block: &Block, place: &str) {
        let mut text = block.text.clone();
        for (name, value) in &self.known {
            text = text.replace(&format!("${name}"), value);
        }
        assert!(!text.contains('$'), "{place}: unknown name in {text}");
        let connections = TaskTracker::new();
        let (client, connection) =
            tokio_postgres::connect(self.world.fleet.url(), NoTls).await.unwrap();
        connections.spawn(async move { connection.await.ok() });
        if block.section != "Act" {
            client.batch_execute("SET default_transaction_read_only = on").await.unwrap();
        }
        for statement in text.split(";\n").filter(|statement| !statement.trim().is_empty()) {
            client
                .simple_query(statement)
                .await
                .unwrap_or_else(|error| panic!("{place}: {error:?}"));
        }
        drop(client);
        connections.close();
        connections.wait().await;
    }

    async fn runs_shell(&self, block: &Block, place: &str) {
        let tools = self.world.fleet.file("tools");
        make_tools(&tools);
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("bash");
        command
            .args(["-euc", &block.text])
            .env("PATH", format!("{}:{path}", tools.display()))
            .env("HOLDFAST_DATABASE_URL", self.world.fleet.url())
            .env("HOLDFAST_CONFIG", self.world.fleet.file("holdfast.toml"))
            .env("HOLDFAST__WORKSPACE__ROOT", self.world.fleet.workspaces())
            .envs(&self.known)
            .current_dir(self.world.fleet.folder())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let ran = tokio::time::timeout(LONG, command.output()).await;
        let ran = ran.unwrap_or_else(|_| panic!("{place}: no end")).unwrap();
        let said = [ran.stdout, ran.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        // A lease that ended between the look and the act is gone, and said to be.
        let overtaken = ran.status.code() == Some(73) && block.text.contains("leases ");
        let well = ran.status.success() || overtaken;
        assert!(well, "{place}: {}: {}\n{said}", ran.status, block.text);
        eprintln!("{place}:\n{said}");
    }
}

/// `holdfast` of this build. What doctor finds is no failure of the page.
fn make_tools(folder: &Path) {
    let file = folder.join("holdfast");
    if file.exists() {
        return;
    }
    fs::create_dir_all(folder).unwrap();
    let script = format!(
        "#!/bin/sh\n'{}' \"$@\"\nstatus=$?\n[ \"$1\" != doctor ] || case $status in 10 | 20) exit 0 ;; \
         esac\nexit $status\n",
        env!("CARGO_BIN_EXE_holdfast")
    );
    fs::write(&file, script).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
}
