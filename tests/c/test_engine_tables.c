/* SPDX-License-Identifier: Apache-2.0 */
/* Settling, and the page tables of a stopped device. */
#define OWN_MAIN
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine_fixture.h"

#define HEADER_BYTES 32u
#define TABLE_BYTES  (HEADER_BYTES + 4u + PAGES * 4u)

static char path[4096];

/* A stopped device: pages 1 and 2 of slab 0 and page 9; page 3 was trimmed. */
static struct world *with_contents(void)
{
	struct world *w = world_mapped(0);

	write_settled(w, 1, 3, 100);
	write_settled(w, 9, 1, 900);
	trim(w, 3, 1);
	return w;
}

static struct world *restarted(const struct world *before)
{
	struct world *w = world_new(0);

	memcpy(iswi_sim_of(w->e)->disk, iswi_sim_of(before->e)->disk, PAGES * ISW_PAGE_BYTES);
	return w;
}

WORLD_TEST(settling_waits_for_the_backup, world_mapped(0))
{
	CHECK_EQ(isw_engine_settle(w->e, 0), 0);
	put(w, 1, 1, 100);
	CHECK_EQ(isw_engine_settle(w->e, 20), -ETIMEDOUT);
	remotes_settle(w);
	CHECK_EQ(isw_engine_settle(w->e, 20), -ETIMEDOUT); /* the donor alone is not enough */
	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), -EBUSY);
	disk_settle(w);
	CHECK_EQ(isw_engine_settle(w->e, 0), 0);
}

TEST(saved_tables_bring_the_contents_back)
{
	struct world *before = with_contents(), *w = restarted(before);
	struct stat st;

	CHECK_EQ(isw_engine_save_tables(before->e, path, NULL), 0);
	CHECK_EQ(stat(path, &st), 0);
	CHECK_EQ(st.st_size, TABLE_BYTES);
	CHECK_EQ(st.st_mode & 077, 0);
	CHECK_EQ(isw_engine_load_tables(w->e, path, NULL), 0);
	CHECK_EQ(read_settled(w, 1), 100);
	CHECK_EQ(read_settled(w, 2), 101);
	CHECK_EQ(read_settled(w, 9), 900);
	CHECK_EQ(read_settled(w, 3), 0);
	CHECK_EQ(read_settled(w, 10), 0);
	/* The checksums came along: a disk that changed meanwhile is found out. */
	iswi_sim_of(w->e)->disk[ISW_PAGE_BYTES + 7] ^= 1;
	CHECK_EQ(read_settled(w, 1), -EIO);
	CHECK_EQ(stats_of(w).crc_errors_backup, 1);
	world_end(before);
	world_end(w);
}

WORLD_TEST(saving_replaces_an_older_file_whole, with_contents())
{
	char temporary[sizeof(path) + 8];

	snprintf(temporary, sizeof(temporary), "%s.new", path);
	write_settled(w, 10, 1, 1000);
	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), 0);
	CHECK(access(temporary, F_OK) < 0);
	CHECK_EQ(isw_engine_save_tables(w->e, "/nowhere/at/all", NULL), -ENOENT);
	CHECK_EQ(mkdir(temporary, 0700), 0); /* in the way: the old file stays good */
	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), -EISDIR);
	CHECK_EQ(rmdir(temporary), 0);
	CHECK_EQ(isw_engine_load_tables(w->e, path, NULL), 0);
}

static void nothing_is_served_of(const struct world *before, const char *what)
{
	struct world *w = restarted(before);
	struct isw_error error = {0};
	int code = isw_engine_load_tables(w->e, path, &error);

	if (code != -EBADMSG || !strstr(error.text, path)) {
		fprintf(stderr, "%s: %d, '%s'\n", what, code, error.text);
		exit(1);
	}
	for (uint32_t page = 0; page < PAGES; page++)
		CHECK(!is_backup_current(w, page));
	CHECK_EQ(stats_of(w).crc_errors_backup, 0);
	world_end(w);
}

static void patch(int fd, off_t at, unsigned char mask)
{
	unsigned char byte;

	CHECK_EQ(pread(fd, &byte, 1, at), 1);
	byte ^= mask;
	CHECK_EQ(pwrite(fd, &byte, 1, at), 1);
}

WORLD_TEST(a_damaged_file_is_refused, with_contents())
{
	char what[64];
	int fd;

	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), 0);
	fd = open(path, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	for (uint32_t at = 0; at < TABLE_BYTES; at++) {
		patch(fd, at, (unsigned char)(1u << at % 8));
		snprintf(what, sizeof(what), "byte %u changed", at);
		nothing_is_served_of(w, what);
		patch(fd, at, (unsigned char)(1u << at % 8));
	}
	CHECK_EQ(pwrite(fd, "x", 1, TABLE_BYTES), 1);
	nothing_is_served_of(w, "one byte longer");
	for (int length = TABLE_BYTES - 1; length >= 0; length -= 5) {
		CHECK_EQ(ftruncate(fd, length), 0);
		snprintf(what, sizeof(what), "cut to %d bytes", length);
		nothing_is_served_of(w, what);
	}
	close(fd);
}

WORLD_TEST(another_devices_tables_are_refused, with_contents())
{
	struct world *other = WORLD_BUT(config.size_bytes -= ISW_PAGE_BYTES);

	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), 0);
	CHECK_EQ(isw_engine_load_tables(other->e, path, NULL), -EBADMSG);
	CHECK_EQ(isw_engine_load_tables(other->e, "/nowhere/at/all", NULL), -ENOENT);
	world_end(other);
}

TEST(without_a_backup_there_are_no_tables)
{
	struct world *before = with_contents(), *w = world_new(ISW_ENGINE_NO_BACKUP);

	CHECK_EQ(isw_engine_save_tables(before->e, path, NULL), 0);
	CHECK_EQ(isw_engine_save_tables(w->e, path, NULL), -EBUSY);
	CHECK_EQ(isw_engine_load_tables(w->e, path, NULL), -EINVAL);
	CHECK_EQ(isw_engine_settle(w->e, 0), 0);
	world_end(before);
	world_end(w);
}

int main(void)
{
	const char *directory = getenv("TMPDIR");
	int fd;

	snprintf(path, sizeof(path), "%s/isw-tables-XXXXXX", directory ? directory : "/tmp");
	fd = mkstemp(path);
	CHECK(fd >= 0);
	close(fd);
	run_tests();
	unlink(path);
	return 0;
}
