/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real process with real threads, killed at any moment, and its successor, again and again. What
 * it was told to write and what it saw answered stands in memory of the parent's, so after each
 * death every answered write must be there, on the state file, a donor over TCP or the backup. The
 * successor waits already, as a standby; it may be killed while it takes over.
 *
 *     test_engine_kill [DEATHS [SEED]]
 */
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "engine_real.h"

#define SLABS      4u
#define SLAB_PAGES 64u
#define PAGES      (SLABS * SLAB_PAGES)
#define WORKERS    4u
#define RUN_PAGES  8u
#define STATE_FD   200
#define LEDGER_FD  201
#define GO_FD      202

extern char **environ;

/* Shared by all processes. Of a page one request at a time is under way. */
struct ledger {
	atomic_uint_fast64_t begun[PAGES], answered[PAGES]; /* values; of eight one is zeros */
	atomic_uint_fast64_t operations, lives, looked;
	atomic_uint tickets; /* made so far, one for each life; published after ticket */
	atomic_uint last;    /* this one lives to its end */
	char ticket[ISW_TICKET_TEXT_BYTES];
	char backup_path[4096]; /* empty: none */
	uint16_t port;
	uint32_t slots[SLABS];
	uint64_t generations[SLABS];
	uint64_t seed;
};

static struct ledger *ledger;

static uint64_t bytes_of(uint64_t value)
{
	return value % 8 ? value : 0;
}

/* ------------------------------------------------------------------------- a process */

struct worker {
	isw_engine *engine;
	uint32_t number;
	uint64_t random;
	pthread_t thread;
	unsigned char *data;
};

/* A page that was read is what was answered last, or what was begun since. */
static void check_page(const unsigned char *data, uint64_t page)
{
	uint64_t value, word;
	uint64_t answered = bytes_of(atomic_load(&ledger->answered[page]));
	uint64_t begun = bytes_of(atomic_load(&ledger->begun[page]));

	memcpy(&value, data, 8);
	for (uint32_t i = 8; i < ISW_PAGE_BYTES; i += 8) {
		memcpy(&word, data + i, 8);
		CHECK_EQ(word, value); /* torn */
	}
	if (value != answered && value != begun)
		fprintf(stderr, "page %llu in life %llu\n", (unsigned long long)page,
			(unsigned long long)atomic_load(&ledger->lives));
	CHECK(value == answered || value == begun);
	atomic_fetch_add(&ledger->looked, 1);
}

static void read_pages(struct worker *w, uint64_t page, uint32_t pages)
{
	CHECK_EQ(ask_and_wait(w->engine, ISWI_READ, page, pages, w->data), 0);
	for (uint32_t i = 0; i < pages; i++)
		check_page(w->data + i * ISW_PAGE_BYTES, page + i);
}

/* What they are from now on, answered or not. */
static void settle_pages(struct worker *w)
{
	for (uint64_t page = 0; page < PAGES; page++) {
		uint64_t begun = atomic_load(&ledger->begun[page]), value;

		read_pages(w, page, 1);
		memcpy(&value, w->data, 8);
		if (value == bytes_of(begun))
			atomic_store(&ledger->answered[page], begun);
		else
			atomic_store(&ledger->begun[page], atomic_load(&ledger->answered[page]));
	}
}

static void change_pages(struct worker *w, uint64_t page, uint32_t pages, bool zero)
{
	for (uint32_t i = 0; i < pages; i++) {
		uint64_t value = (atomic_load(&ledger->begun[page + i]) | 7) + 1 + !zero;

		atomic_store(&ledger->begun[page + i], value);
		for (uint32_t k = 0; k < ISW_PAGE_BYTES; k += 8)
			memcpy(w->data + i * ISW_PAGE_BYTES + k, &value, 8);
	}
	CHECK_EQ(ask_and_wait(w->engine, zero ? ISWI_TRIM : ISWI_WRITE, page, pages, w->data), 0);
	for (uint32_t i = 0; i < pages; i++)
		atomic_store(&ledger->answered[page + i], atomic_load(&ledger->begun[page + i]));
}

static void *work(void *arg)
{
	struct worker *w = arg;
	uint64_t first = w->number * (PAGES / WORKERS), end = first + PAGES / WORKERS;

	while (!atomic_load(&ledger->last)) {
		uint64_t page = first + below(&w->random, (uint32_t)(end - first));
		uint32_t pages = below(&w->random, 2) ? 1 : 1 + below(&w->random, RUN_PAGES);
		uint32_t kind = below(&w->random, 8);

		pages = (uint32_t)ISWI_MIN(pages, end - page);
		if (kind < 2)
			read_pages(w, page, pages);
		else
			change_pages(w, page, pages, kind == 2);
		atomic_fetch_add(&ledger->operations, 1);
	}
	return NULL;
}

static void worker_init(struct worker *w, isw_engine *e, uint32_t number)
{
	*w = (struct worker){.engine = e, .number = number};
	w->random = ledger->seed + number * 7919 + atomic_load(&ledger->lives) * 104729 + 1;
	w->data = aligned_alloc(ISW_PAGE_BYTES, RUN_PAGES * ISW_PAGE_BYTES);
	CHECK(w->data);
}

static struct isw_engine_config engine_config(uint32_t flags)
{
	return (struct isw_engine_config){
		.size_bytes = PAGES * ISW_PAGE_BYTES,
		.slab_bytes = SLAB_PAGES * ISW_PAGE_BYTES,
		.staging_pages = 96,
		.request_bytes_max = RUN_PAGES * ISW_PAGE_BYTES,
		.requests_max = WORKERS + 1,
		.remotes_max = 2,
		.backup_write_bytes_max = 16 * ISW_PAGE_BYTES,
		.backup_writers = 2,
		.backup_readers = 1,
		.flags = flags | (ledger->backup_path[0] ? 0 : ISW_ENGINE_NO_BACKUP),
		.state_fd = STATE_FD,
	};
}

/* The donor's connections: new ones, or those of the record again. */
static void find_donor(isw_engine *e, uint32_t life)
{
	struct isw_remote_config remote =
		donor_config("127.0.0.1", ledger->port, ledger->ticket, 2, PAGES * ISW_PAGE_BYTES);
	unsigned char record[ISW_RECORD_BYTES_MAX];
	struct isw_error error = {0};
	uint32_t number = 0;
	int code;

	while (atomic_load(&ledger->tickets) <= life) /* the old connections are fenced */
		pause_us(1000);
	code = isw_remote_record(e, 0, record);
	if (code) {
		CHECK_EQ(code, 5);
		CHECK(!memcmp(record, "lease", 5));
		code = isw_remote_reconnect(e, 0, &remote, &error);
	} else {
		code = isw_remote_connect(e, &remote, &number, &error);
		CHECK_EQ(number, 0);
		if (!code)
			CHECK_EQ(isw_remote_record_set(e, 0, "lease", 5), 0);
	}
	CHECK_OK(code, error);
	for (uint32_t slab = 0; slab < SLABS; slab++) {
		struct isw_slab_info info;

		CHECK_EQ(isw_engine_slabs(e, slab, 1, &info), 1);
		if (info.state == ISW_SLAB_UNMAPPED)
			code = isw_slab_map(e, slab, 0, ledger->slots[slab],
					    ledger->generations[slab]);
		else
			code = isw_slab_resume(e, slab, 0, info.generation);
		CHECK_EQ(code, 0);
	}
}

static int live(uint32_t life)
{
	struct isw_engine_config config = engine_config(life ? ISW_ENGINE_STANDBY : 0);
	const char *path = ledger->backup_path[0] ? ledger->backup_path : NULL;
	struct isw_error error = {0};
	struct worker workers[WORKERS + 1], *reader = &workers[WORKERS];
	isw_engine *e;
	int code;
	char go;

	code = isw_engine_create(&config, life ? NULL : path, &e, &error);
	if (!code && life) {
		CHECK_EQ(read(GO_FD, &go, 1), 1);
		code = isw_engine_take_over(e, path, &error);
	}
	CHECK_OK(code, error);
	atomic_fetch_add(&ledger->lives, 1);
	worker_init(reader, e, WORKERS);
	if (path) /* with a backup nothing waits for the donor */
		settle_pages(reader);
	find_donor(e, life);
	settle_pages(reader);
	for (uint32_t i = 0; i < WORKERS; i++) {
		worker_init(&workers[i], e, i);
		CHECK_EQ(iswi_thread_start(&workers[i].thread, "worker", work, &workers[i]), 0);
	}
	for (uint32_t i = 0; i < WORKERS; i++)
		pthread_join(workers[i].thread, NULL);
	settle_pages(reader);
	CHECK_EQ(isw_engine_settle(e, REAL_WAIT_MS), 0);
	settle_pages(reader);
	for (uint32_t i = 0; i <= WORKERS; i++)
		free(workers[i].data);
	isw_engine_destroy(e);
	return 0;
}

/* ------------------------------------------------------------------------ the parent */

struct child {
	pid_t pid;
	int go_fd;
};

static struct child spawn(const char *program, uint32_t life, int state_fd, int ledger_fd)
{
	posix_spawn_file_actions_t actions;
	char number[16], *argv[] = {(char *)program, "live", number, NULL};
	struct child child;
	int pipe_fds[2];

	snprintf(number, sizeof(number), "%u", life);
	CHECK_EQ(pipe2(pipe_fds, O_CLOEXEC), 0);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, state_fd, STATE_FD);
	posix_spawn_file_actions_adddup2(&actions, ledger_fd, LEDGER_FD);
	posix_spawn_file_actions_adddup2(&actions, pipe_fds[0], GO_FD);
	CHECK_EQ(posix_spawn(&child.pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
	posix_spawn_file_actions_destroy(&actions);
	close(pipe_fds[0]);
	child.go_fd = pipe_fds[1];
	return child;
}

/* Until it serves and has done so much, or for a moment: it may not even have taken over. */
static void let_live(const struct child *child, uint64_t *random)
{
	uint64_t lives = atomic_load(&ledger->lives), operations = below(random, 400);
	uint64_t before = atomic_load(&ledger->operations);
	int status;

	if (!below(random, 3)) {
		pause_us(below(random, 20000));
		return;
	}
	for (uint32_t i = 0; atomic_load(&ledger->operations) < before + operations; i++) {
		if (waitpid(child->pid, &status, WNOHANG) == child->pid) {
			fprintf(stderr, "life %llu ended by itself: %x\n",
				(unsigned long long)lives, (unsigned int)status);
			exit(1);
		}
		CHECK(i < REAL_WAIT_MS);
		pause_us(1000);
	}
}

static void bury(const struct child *child)
{
	int status;

	close(child->go_fd);
	CHECK_EQ(waitpid(child->pid, &status, 0), child->pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static isw_store *make_donor(uint64_t *lease)
{
	isw_store *store =
		donor_store("127.0.0.1", SLAB_PAGES * ISW_PAGE_BYTES, SLABS, SLABS, &ledger->port);

	CHECK_EQ(lease_create(store, SLABS, ledger->ticket, lease, NULL), 0);
	for (uint32_t i = 0; i < SLABS; i++)
		CHECK_EQ(
			isw_store_map(store, *lease, i, &ledger->slots[i], &ledger->generations[i]),
			0);
	return store;
}

static void run(const char *program, const char *backup_path, uint32_t deaths, uint64_t seed)
{
	int state_fd = memfd_create("state", MFD_CLOEXEC);
	int ledger_fd = memfd_create("ledger", MFD_CLOEXEC);
	uint64_t lease, random = seed | 1;
	struct child active, standby;
	isw_store *store;
	int status;

	CHECK_EQ(ftruncate(ledger_fd, sizeof(*ledger)), 0);
	ledger = mmap(NULL, sizeof(*ledger), PROT_READ | PROT_WRITE, MAP_SHARED, ledger_fd, 0);
	CHECK(ledger != MAP_FAILED);
	ledger->seed = seed;
	snprintf(ledger->backup_path, sizeof(ledger->backup_path), "%s", backup_path);
	store = make_donor(&lease);
	atomic_store(&ledger->tickets, 1);
	active = spawn(program, 0, state_fd, ledger_fd);
	while (!atomic_load(&ledger->operations)) /* the first one has a state file by now */
		pause_us(1000);
	for (uint32_t life = 1; life <= deaths; life++) {
		standby = spawn(program, life, state_fd, ledger_fd);
		let_live(&active, &random);
		CHECK_EQ(kill(active.pid, SIGKILL), 0);
		/* At once: whoever is dying may still hold its locks. */
		CHECK_EQ(write(standby.go_fd, "", 1), 1);
		CHECK_EQ(lease_renew(store, lease, REAL_WAIT_MS, ledger->ticket), 0);
		atomic_store(&ledger->tickets, life + 1);
		bury(&active);
		active = standby;
	}
	let_live(&active, &random);
	atomic_store(&ledger->last, 1);
	CHECK_EQ(waitpid(active.pid, &status, 0), active.pid);
	CHECK_EQ(status, 0);
	close(active.go_fd);
	printf("%s a backup: %u deaths, %llu of them while serving; %llu operations, %llu pages "
	       "looked at\n",
	       *backup_path ? "with" : "without", deaths,
	       (unsigned long long)atomic_load(&ledger->lives) - 1,
	       (unsigned long long)atomic_load(&ledger->operations),
	       (unsigned long long)atomic_load(&ledger->looked));
	isw_store_destroy(store);
	munmap(ledger, sizeof(*ledger));
	close(state_fd);
	close(ledger_fd);
}

int main(int argc, char **argv)
{
	uint32_t deaths = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 12;
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : iswi_now_ns() | 1;
	char path[4096];

	if (argc == 3 && !strcmp(argv[1], "live")) {
		ledger = mmap(NULL, sizeof(*ledger), PROT_READ | PROT_WRITE, MAP_SHARED, LEDGER_FD,
			      0);
		CHECK(ledger != MAP_FAILED);
		return live((uint32_t)strtoul(argv[2], NULL, 10));
	}
	printf("seed %llu\n", (unsigned long long)seed);
	fflush(stdout);
	run(argv[0], "", deaths, seed);
	find_backup("kill", path, sizeof(path));
	run(argv[0], path, deaths, seed);
	unlink(path);
	return 0;
}
