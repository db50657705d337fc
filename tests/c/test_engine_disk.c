/* SPDX-License-Identifier: Apache-2.0 */
/* The backup's own threads and file: errors, retries, merging, the lock, the space. */
#define OWN_MAIN
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/backup/backup.h"
#include "engine_workers.h"
#include "tests_between.h"

#define PAGES  512u
#define BAD_AT 300u /* a bad sector's page */
#define STUCK  24u

static char path[4096];

static struct isw_engine_config config(void)
{
	return (struct isw_engine_config){
		.size_bytes = PAGES * ISW_PAGE_BYTES,
		.slab_bytes = 64 * ISW_PAGE_BYTES,
		.staging_pages = 64,
		.request_bytes_max = RUN_PAGES * ISW_PAGE_BYTES,
		.requests_max = 32,
		.remotes_max = 1,
		.state_fd = -1,
		.backup_write_bytes_max = 16 * ISW_PAGE_BYTES,
		.backup_writers = 2,
		.backup_readers = 1,
	};
}

static isw_engine *open_engine(void)
{
	const struct isw_engine_config c = config();
	struct isw_error error = {0};
	isw_engine *opened = NULL;

	CHECK_OK(isw_engine_create(&c, path, &opened, &error), error);
	return opened;
}

/* A test of an engine of its own. */
static isw_engine *e;

#define ENGINE_TEST(name) BETWEEN_TEST(name, e = open_engine(), isw_engine_destroy(e))

/* ------------------------------------------------------------- one request at a time */

struct page_asked {
	struct asked asked;
	_Alignas(ISW_PAGE_BYTES) unsigned char data[ISW_PAGE_BYTES];
};

static void ask_page(struct page_asked *a, enum iswi_req_op op, uint64_t page, uint64_t value)
{
	for (uint32_t i = 0; op == ISWI_WRITE && i < ISW_PAGE_BYTES; i += 8)
		memcpy(a->data + i, &value, 8);
	ask(e, &a->asked, op, page, op != ISWI_FLUSH, a->data);
}

static int do_one(enum iswi_req_op op, uint64_t page, uint64_t value)
{
	struct page_asked a;

	ask_page(&a, op, page, value);
	return answer(&a.asked);
}

static uint64_t read_one(uint64_t page)
{
	struct page_asked a;
	uint64_t value;

	ask_page(&a, ISWI_READ, page, 0);
	CHECK_EQ(answer(&a.asked), 0);
	memcpy(&value, a.data, sizeof(value));
	return value;
}

/* ------------------------------------------------------------------ a failing disk */

struct bad_disk {
	const struct iswi_backup_ops *ops;
	void *ctx;
	atomic_bool bad;   /* relaxed: a switch */
	atomic_bool still; /* relaxed: no write ends */
	bool all, slow;
	atomic_uint_fast64_t tries, writes, pages;
};

static int bad_write(void *ctx, const struct iovec *iov, int iov_count, uint64_t offset)
{
	struct bad_disk *d = ctx;
	uint64_t first = offset / ISW_PAGE_BYTES;

	iswi_count(&d->writes, 1);
	iswi_count(&d->pages, (uint64_t)iov_count);
	if (d->slow)
		pause_ms(1);
	while (atomic_load_explicit(&d->still, memory_order_relaxed))
		pause_ms(1);
	if ((d->all || (first <= BAD_AT && BAD_AT < first + (uint64_t)iov_count)) &&
	    atomic_load_explicit(&d->bad, memory_order_relaxed)) {
		iswi_count(&d->tries, 1);
		return -EIO;
	}
	return d->ops->write(d->ctx, iov, iov_count, offset);
}

static int bad_read(void *ctx, void *buf, uint32_t bytes, uint64_t offset)
{
	struct bad_disk *d = ctx;

	return d->ops->read(d->ctx, buf, bytes, offset);
}

static int bad_sync(void *ctx)
{
	struct bad_disk *d = ctx;

	return d->ops->sync(d->ctx);
}

static void bad_destroy(void *ctx)
{
	struct bad_disk *d = ctx;

	d->ops->destroy(d->ctx);
}

static const struct iswi_backup_ops bad_ops = {"bad", bad_write, bad_read, bad_sync, bad_destroy};

/* Before the first request: the threads look at the backup only when there is work. */
static void make_bad(struct bad_disk *d)
{
	*d = (struct bad_disk){.ops = e->backup->ops, .ctx = e->backup->ctx};
	atomic_store_explicit(&d->bad, true, memory_order_relaxed);
	e->backup->ctx = d;
	e->backup->ops = &bad_ops;
}

static void wait_event(uint32_t kind)
{
	uint64_t end_ns = iswi_now_ns() + WAIT_MS * 1000000ull;
	struct isw_event event;

	while (!isw_engine_events(e, &event, 1)) {
		CHECK(iswi_now_ns() < end_ns);
		pause_ms(2);
	}
	CHECK_EQ(event.kind, kind);
}

ENGINE_TEST(a_bad_sector_is_retried_until_it_is_good)
{
	struct isw_engine_stats stats;
	struct bad_disk disk;
	struct page_asked stuck;

	make_bad(&disk);
	CHECK_EQ(do_one(ISWI_WRITE, 1, 100), 0);
	ask_page(&stuck, ISWI_WRITE, BAD_AT, 200);
	wait_event(ISW_EVENT_BACKUP_FAILING);
	isw_engine_stats(e, &stats);
	CHECK_EQ(stats.backup_failing, 1);
	CHECK_EQ(stats.requests_in_flight, 1);
	CHECK_EQ(do_one(ISWI_FLUSH, 0, 0), -EIO);
	CHECK_EQ(do_one(ISWI_WRITE, 1, 101), 0); /* the rest goes on */
	CHECK_EQ(read_one(BAD_AT), 200);
	CHECK_EQ(isw_engine_settle(e, 20), -ETIMEDOUT);
	atomic_store_explicit(&disk.bad, false, memory_order_relaxed);
	wait_event(ISW_EVENT_BACKUP_RECOVERED);
	CHECK_EQ(answer(&stuck.asked), 0);
	CHECK_EQ(do_one(ISWI_FLUSH, 0, 0), 0);
	CHECK_EQ(isw_engine_settle(e, WAIT_MS), 0);
	CHECK_EQ(read_one(BAD_AT), 200);
	CHECK_EQ(read_one(1), 101);
}

/* Workers whose writes hardly ever leave the queue empty. */
ENGINE_TEST(retries_come_due_and_are_paced_on_a_busy_disk)
{
	static struct crowd crowd;
	uint64_t began_ns = iswi_now_ns(), seconds;
	struct bad_disk disk;
	struct page_asked stuck;

	make_bad(&disk);
	disk.slow = true;
	ask_page(&stuck, ISWI_WRITE, BAD_AT, 200);
	wait_event(ISW_EVENT_BACKUP_FAILING);
	crowd_start(&crowd, e, 1, BAD_AT - 50, false);
	while (iswi_counted(&disk.tries) < 3) {
		CHECK(iswi_now_ns() - began_ns < WAIT_MS * 1000000ull);
		pause_ms(20);
	}
	/* One a second; the first may be followed by another at once. */
	seconds = (iswi_now_ns() - began_ns) / 1000000000ull;
	CHECK(iswi_counted(&disk.tries) <= seconds + 3);
	atomic_store_explicit(&disk.bad, false, memory_order_relaxed);
	wait_event(ISW_EVENT_BACKUP_RECOVERED);
	CHECK_EQ(answer(&stuck.asked), 0);
	crowd_stop(&crowd);
	crowd_check(&crowd);
	/* Writes were merged: a write a page would wear a cloud disk out. */
	CHECK(iswi_counted(&disk.writes) < iswi_counted(&disk.pages));
	crowd_free(&crowd);
}

ENGINE_TEST(failing_at_once_is_not_retried_at_once)
{
	struct bad_disk disk;
	struct page_asked stuck[STUCK];
	uint64_t began_ns = iswi_now_ns(), seconds, tries;

	/* Two writers, each failing what the other has just queued anew, would never pause. */
	make_bad(&disk);
	disk.all = true;
	for (uint32_t i = 0; i < STUCK; i++)
		ask_page(&stuck[i], ISWI_WRITE, 2 * i, i);
	while (iswi_counted(&disk.tries) < 3 * STUCK) {
		CHECK(iswi_now_ns() - began_ns < WAIT_MS * 1000000ull);
		pause_ms(20);
	}
	tries = iswi_counted(&disk.tries);
	seconds = (iswi_now_ns() - began_ns) / 1000000000ull;
	CHECK(tries <= 2 * STUCK * (seconds + 2));
	atomic_store_explicit(&disk.bad, false, memory_order_relaxed);
	for (uint32_t i = 0; i < STUCK; i++)
		CHECK_EQ(answer(&stuck[i].asked), 0);
}

/* ------------------------------------------------- pages that a donor has as well */

/* Slab 0 of the engine is mapped to a donor. */
static isw_store *map_to_donor(void)
{
	const uint64_t slab_bytes = config().slab_bytes;
	char ticket[ISW_TICKET_TEXT_BYTES];
	struct isw_remote_config remote;
	struct isw_error error = {0};
	uint64_t lease, generation;
	uint32_t number, slot;
	uint16_t port;
	isw_store *store = donor_store("127.0.0.1", slab_bytes, 1, 1, &port);

	CHECK_EQ(lease_create(store, 1, ticket, &lease, &error), 0);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	remote = donor_config("127.0.0.1", port, ticket, 1, slab_bytes);
	CHECK_EQ(isw_remote_connect(e, &remote, &number, &error), 0);
	CHECK_EQ(isw_slab_map(e, 0, number, slot, generation), 0);
	return store;
}

/* Both wait for neighbours. The writer that comes takes one of them, and stands still. */
ENGINE_TEST(a_page_does_not_wait_for_a_writer_that_stands_still)
{
	isw_store *store = map_to_donor();
	uint64_t end_ns = iswi_now_ns() + WAIT_MS * 1000000ull;
	struct bad_disk disk;

	make_bad(&disk);
	atomic_store_explicit(&disk.bad, false, memory_order_relaxed);
	atomic_store_explicit(&disk.still, true, memory_order_relaxed);
	CHECK_EQ(do_one(ISWI_WRITE, 0, 100), 0);
	CHECK_EQ(do_one(ISWI_WRITE, 32, 200), 0);
	while (iswi_counted(&disk.writes) < 2) { /* neither has ended */
		CHECK(iswi_now_ns() < end_ns);
		pause_ms(2);
	}
	atomic_store_explicit(&disk.still, false, memory_order_relaxed);
	CHECK_EQ(isw_engine_settle(e, WAIT_MS), 0);
	isw_engine_destroy(e);
	isw_store_destroy(store);
	e = open_engine();
}

/* --------------------------------------------------------------------- the file */

ENGINE_TEST(contents_outlive_the_engine)
{
	char tables[sizeof(path) + 8];

	snprintf(tables, sizeof(tables), "%s.tables", path);
	for (uint64_t page = 0; page < PAGES; page += 3)
		CHECK_EQ(do_one(ISWI_WRITE, page, 1000 + page), 0);
	CHECK_EQ(do_one(ISWI_TRIM, 3, 0), 0);
	CHECK_EQ(isw_engine_settle(e, WAIT_MS), 0);
	CHECK_EQ(isw_engine_save_tables(e, tables, NULL), 0);
	isw_engine_destroy(e);
	e = open_engine();
	CHECK_EQ(isw_engine_load_tables(e, tables, NULL), 0);
	for (uint64_t page = 0; page < PAGES; page++)
		CHECK_EQ(read_one(page), page % 3 || page == 3 ? 0 : 1000 + page);
	unlink(tables);
}

ENGINE_TEST(a_backup_has_one_owner)
{
	const struct isw_engine_config c = config();
	isw_engine *second = NULL;
	struct isw_error error = {0};

	CHECK_EQ(isw_engine_create(&c, path, &second, &error), -EWOULDBLOCK);
	CHECK(strstr(error.text, path));
	CHECK(!second);
	CHECK_EQ(do_one(ISWI_WRITE, 1, 100), 0); /* the first is not disturbed */
	isw_engine_destroy(e);
	e = open_engine();
}

TEST(its_space_is_reserved_and_nobody_else_may_read_it)
{
	struct stat st;

	unlink(path);
	e = open_engine();
	CHECK_EQ(stat(path, &st), 0);
	CHECK_EQ(st.st_size, PAGES * ISW_PAGE_BYTES);
	CHECK((uint64_t)st.st_blocks * 512 >= PAGES * ISW_PAGE_BYTES);
	CHECK_EQ(st.st_mode & 077, 0);
	isw_engine_destroy(e);
}

TEST(a_backup_that_cannot_be_had_leaves_nothing_behind)
{
	const struct isw_engine_config c = config();
	struct isw_error error = {0};
	isw_engine *none = NULL;
	struct stat before, after;
	void *ctx;

	/* More than any file system can hold in one file. */
	CHECK_EQ(stat(path, &before), 0);
	CHECK(iswi_backup_file_open(path, INT64_MAX / 2, false, &ctx, &error) < 0);
	CHECK(strstr(error.text, path));
	CHECK_EQ(stat(path, &after), 0);
	CHECK_EQ(after.st_size, before.st_size);
	CHECK_EQ(after.st_blocks, before.st_blocks);
	unlink(path);
	CHECK(iswi_backup_file_open(path, INT64_MAX / 2, false, &ctx, &error) < 0);
	CHECK(access(path, F_OK) < 0);
	CHECK_EQ(isw_engine_create(&c, "/nowhere/at/all", &none, &error), -ENOENT);
	CHECK_EQ(isw_engine_create(&c, "/", &none, &error), -EISDIR);
	CHECK_EQ(isw_engine_create(&c, NULL, &none, &error), -EINVAL);
	CHECK(!none);
}

/* What opening says of a path, NULL: nothing, it was opened. The file is left as it was. */
static const char *objection(const char *backup, bool predecessors)
{
	static struct isw_error error;
	struct stat before = {0}, after = {0};
	void *ctx = NULL;
	int code;

	lstat(backup, &before);
	code = iswi_backup_file_open(backup, ISW_PAGE_BYTES, predecessors, &ctx, &error);
	if (code == 0) {
		iswi_backup_file_ops.destroy(ctx);
		return NULL;
	}
	lstat(backup, &after);
	CHECK_EQ(after.st_ino, before.st_ino);
	CHECK_EQ(after.st_size, before.st_size);
	CHECK_EQ(after.st_mode, before.st_mode);
	CHECK(strstr(error.text, backup));
	return error.text;
}

static bool objects(const char *backup, const char *why)
{
	const char *text = objection(backup, false);

	return text && strstr(text, why) != NULL;
}

TEST(a_backup_that_others_can_read_or_replace_is_refused)
{
	char directory[4200], file[4300], other[4300];

	snprintf(directory, sizeof(directory), "%s.dir", path);
	snprintf(file, sizeof(file), "%s/file", directory);
	snprintf(other, sizeof(other), "%s/other", directory);
	CHECK_EQ(mkdir(directory, 0700), 0);
	CHECK(!objection(file, false)); /* made by us */
	CHECK(!objection(file, false));
	CHECK_EQ(chmod(file, 0666), 0);
	CHECK(objects(file, "can be read or written by other users"));
	CHECK_EQ(chmod(file, 0640), 0);
	CHECK(objects(file, "can be read or written by other users"));
	CHECK(!objection(file, true)); /* the pages of one that has died are there already */
	CHECK_EQ(chmod(file, 0600), 0);
	CHECK_EQ(link(file, other), 0);
	CHECK(objects(file, "has another name too"));
	unlink(other);
	CHECK_EQ(chmod(directory, 0777), 0);
	CHECK(objects(file, "a directory that everybody may write to"));
	CHECK(objects(other, "a directory that everybody may write to"));
	CHECK(access(other, F_OK) < 0);
	CHECK_EQ(chmod(directory, 01777), 0); /* as /tmp: nobody else can take our file away */
	CHECK(!objection(file, false));
	if (geteuid() == 0) {
		CHECK_EQ(chown(file, 65534, 65534), 0);
		CHECK(objects(file, "belongs to another user"));
		CHECK(strstr(objection(file, true), "belongs to another user"));
	}
	unlink(file);
	rmdir(directory);
}

TEST(a_link_is_not_followed_to_a_file)
{
	char link[4200];

	snprintf(link, sizeof(link), "%s.link", path);
	CHECK_EQ(symlink(path, link), 0);
	CHECK(objects(link, "symbolic link"));
	CHECK(strstr(objection(link, true), "symbolic link"));
	unlink(link);
	CHECK_EQ(symlink("absent", link), 0);
	CHECK(objects(link, "symbolic link"));
	unlink(link);
}

TEST(wrong_numbers_of_threads_are_refused)
{
	static const uint32_t wrong[][2] = {{0, 1}, {1, 0}, {8, 9}};
	isw_engine *none = NULL;

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(wrong); i++) {
		struct isw_engine_config c = config();

		c.backup_writers = wrong[i][0];
		c.backup_readers = wrong[i][1];
		CHECK_EQ(isw_engine_create(&c, path, &none, NULL), -EINVAL);
	}
	CHECK(access(path, F_OK) < 0);
}

int main(void)
{
	find_backup("disk", path, sizeof(path));
	run_tests();
	unlink(path);
	return 0;
}
