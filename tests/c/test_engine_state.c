/* SPDX-License-Identifier: Apache-2.0 */
/* The state file: what a successor finds there, and what it makes of one that is damaged. */
#define _GNU_SOURCE 1
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state_fixture.h"

/* ------------------------------------------------------------------------ its pages */

WORLD_TEST(what_was_staged_is_staged_again, world_new(0))
{
	struct world *s;
	uint32_t id = put(w, 1, 2, 10);

	CHECK_EQ(w->error[id], PENDING);
	s = successor(w);
	CHECK_EQ(stats_of(s).staging_pages_used, 2);
	CHECK_EQ(read_settled(s, 1), 10);
	CHECK_EQ(disk_value(s, 2), 11); /* it was queued for the backup */
}

WORLD_TEST(what_the_donor_has_is_read_there_after_resume, world_holding(0, 1, 1, 10))
{
	struct world *s = successor(w);

	CHECK_EQ(slab_of(s, 0).state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(slab_of(s, 0).remote_valid_pages, 1);
	READ_FROM(s, backup, 1, 10);
	bring_back(s, 0);
	READ_FROM(s, remote, 1, 10);
	/* Mapping numbers go on above the old ones. */
	unmap(s);
	map(s, 0, 0);
	CHECK(atomic_load(&iswi_place(s->e, 0, 0)->word) >> 8 >
	      atomic_load(&iswi_place(w->e, 0, 0)->word) >> 8);
}

WORLD_CASES(an_older_version_does_not_come_back, 2, zeroed, world_mapped(0))
{
	put(w, 1, 1, 10); /* its buffer is held by the transfer */
	if (zeroed) {
		CHECK_EQ(w->error[trim(w, 1, 1)], 0);
	} else {
		put(w, 1, 1, 20);
		CHECK_EQ(descriptors(w), 1);
		disk_settle(w);
	}
	CHECK_EQ(sent(w, 0), 1);
	CHECK_EQ(descriptors(w), 0);
	CHECK_EQ(read_settled(successor(w), 1), zeroed ? 0 : 20);
}

WORLD_CASES(of_two_descriptors_the_newer_one_counts, 2, n, world_new(0))
{
	struct world *s;
	uint32_t old = 0, new = STAGING - 1, version = n ? UINT32_MAX : 1;

	put(w, 1, 1, 10);
	for (old = 0; iswi_kept64(&w->e->slots[old].page) != 1; old++)
		;
	/* As if it had died before the older one was cleared. */
	w->e->slots[old].version = version;
	w->e->slots[new].version = iswi_version_after(version);
	for (uint32_t k = 0; k < ISW_PAGE_BYTES; k += 8)
		memcpy(w->e->staging + new *ISW_PAGE_BYTES + k, &(uint64_t){20}, 8);
	w->e->slots[new].seal.number =
		iswi_crc32c(w->e->staging + new *ISW_PAGE_BYTES, ISW_PAGE_BYTES);
	atomic_store(&w->e->slots[new].page, 1);
	s = successor(w);
	CHECK_EQ(descriptors(s), 1);
	CHECK_EQ(read_settled(s, 1), 20);
	atomic_store(&w->e->slots[new].page, ISWI_NO_PAGE);
	w->e->slots[old].version = 1;
	settle(w);
}

WORLD_TEST(copies_have_no_descriptor, world_holding(0, 1, 1, 10))
{
	struct world *s;

	unmap(w);
	map(w, 0, 0);
	fill(w, 0, 8, 1);
	DISK_READ(w);
	CHECK_EQ(sent_for(w, 0, 1, ISWI_XFER_WRITE), 1);
	CHECK_EQ(descriptors(w), 0);
	s = successor(w);
	CHECK_EQ(stats_of(s).staging_pages_used, 0);
	CHECK_EQ(read_settled(s, 1), 10);
}

WORLD_TEST(without_a_backup_what_is_staged_waits_for_a_donor,
	   world_holding(ISW_ENGINE_NO_BACKUP, 0, 1, 5))
{
	struct world *s;

	put(w, 1, 1, 10);
	put(w, 2, 1, 20);
	APPLY(w, 0, 0);
	s = successor(w);
	settle(s);
	CHECK_EQ(stats_of(s).staging_pages_used, 2);
	CHECK_EQ(read_settled(s, 1), 10);
	CHECK_EQ(read_settled(s, 0), -EIO); /* its donor is away */
	bring_back(s, 0);
	CHECK_EQ(sent(s, 0), 2);
	settle(s);
	CHECK_EQ(read_settled(s, 0), 5);
	CHECK_EQ(read_settled(s, 2), 20);
	CHECK_EQ(donor_value(s, 0, 1), 10);
	/* The donor is given up, and the slab finds another one. */
	s = successor(w);
	unmap(s);
	CHECK_EQ(remote_new(s), 1);
	map(s, 0, 1);
	CHECK_EQ(sent(s, 1), 2);
	settle(s);
	CHECK_EQ(read_settled(s, 1), 10);
	CHECK_EQ(read_settled(s, 0), -EIO); /* lost, not zeros */
}

WORLD_TEST(a_drain_is_finished_and_reported, world_mapped(0))
{
	struct world *s;
	uint64_t generation = slab_of(w, 0).generation;

	write_settled(w, 2, 1, 5);
	put(w, 1, 1, 10);
	unmap(w);
	CHECK_EQ(slab_of(w, 0).state, ISW_SLAB_DRAINING);
	s = successor(w);
	CHECK_EQ(slab_of(s, 0).state, ISW_SLAB_UNMAPPED);
	CHECK_EQ(s->events[ISW_EVENT_SLAB_DRAINED], 1);
	CHECK_EQ(s->last[ISW_EVENT_SLAB_DRAINED].generation, generation);
	CHECK(!is_remote_valid(s, 2));
	CHECK_EQ(read_settled(s, 2), 5);
}

WORLD_TEST(both_places_of_a_slab_that_migrates_are_kept, world_holding(0, 1, 2, 10))
{
	struct world *s;

	CHECK_EQ(remote_new(w), 1);
	CHECK_EQ(isw_slab_migrate(w->e, 0, 1, 0, ++w->generations), 0);
	write_settled(w, 1, 1, 30);
	s = successor(w);
	CHECK_EQ(slab_of(s, 0).state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(slab_of(s, 0).remote, 1);
	CHECK_EQ(slab_of(s, 0).source_state, ISW_SLAB_SUSPENDED);
	CHECK_EQ(slab_of(s, 0).source_remote, 0);
	bring_back(s, 0);
	bring_back(s, 1);
	READ_FROM(s, remote, 1, 30);
	READ_FROM(s, remote, 2, 11);
}

WORLD_CASES(a_staged_page_with_wrong_bytes_is_an_error, 2, lossy,
	    world_mapped(lossy ? ISW_ENGINE_NO_BACKUP : 0))
{
	struct world *s;
	uint32_t slot;

	write_settled(w, 1, 1, 10);
	put(w, 1, 2, 20);
	for (slot = 0; iswi_kept64(&w->e->slots[slot].page) != 1; slot++)
		;
	w->e->staging[slot * ISW_PAGE_BYTES + 7] ^= 4;
	s = successor(w);
	w->e->staging[slot * ISW_PAGE_BYTES + 7] ^= 4;
	CHECK_EQ(s->events[ISW_EVENT_BAD_PAGE], 1);
	CHECK_EQ(s->last[ISW_EVENT_BAD_PAGE].value, 1);
	CHECK_EQ(read_settled(s, 1), -EIO); /* neither zeros nor what it was */
	CHECK_EQ(read_settled(s, 2), 21);
	bring_back(s, 0);
	CHECK_EQ(read_settled(s, 1), -EIO);
	write_settled(s, 1, 1, 30);
	CHECK_EQ(read_settled(s, 1), 30);
}

/* -------------------------------------------------------------------------- records */

WORLD_TEST(a_record_goes_with_its_remote, world_new(0))
{
	struct world *s;
	char record[ISW_RECORD_BYTES_MAX], big[ISW_RECORD_BYTES_MAX + 1] = {0};
	uint32_t remote = remote_new(w);

	CHECK_EQ(isw_remote_record(w->e, remote, record), 0);
	CHECK_EQ(isw_remote_record_set(w->e, remote, "first", 5), 0);
	CHECK_EQ(isw_remote_record_set(w->e, remote, "second", 6), 0);
	CHECK_EQ(isw_remote_record(w->e, remote, record), 6);
	CHECK(!memcmp(record, "second", 6));
	CHECK_EQ(isw_remote_record_set(w->e, remote, big, sizeof(big)), -E2BIG);
	CHECK_EQ(isw_remote_record_set(w->e, remote + 1, "x", 1), -ENOTCONN);
	s = successor(w);
	CHECK_EQ(isw_remote_record(s->e, remote, record), 6);
	CHECK_EQ(isw_remote_destroy(s->e, remote), 0); /* it was down */
	CHECK_EQ(isw_remote_record(s->e, remote, record), 0);
}

/* --------------------------------------------------------------------------- damage */

static int try(int fd, uint32_t flags, const struct world *w, char *text)
{
	struct isw_engine_config config = world_config(flags | ISW_ENGINE_STANDBY);
	struct isw_error error = {0};
	struct isw_state_info info;
	isw_engine *e = NULL;
	int code, read_code;

	config.state_fd = fd;
	read_code = isw_state_read(fd, &info, &error);
	CHECK(!read_code == !error.text[0]);
	code = isw_sim_create(&config, &e, &error);
	if (read_code)
		CHECK_EQ(code, read_code); /* found before there is an engine */
	if (!code) {
		code = isw_sim_take_over(e, w->e, 0, &error);
		isw_engine_destroy(e);
	}
	CHECK_EQ(error.code, code);
	snprintf(text, ISW_ERROR_TEXT_BYTES, "%s", error.text);
	return code;
}

static void expect(int fd, uint32_t flags, const struct world *w, int code, const char *says)
{
	char text[ISW_ERROR_TEXT_BYTES], before[64], after[64];
	int got = try(fd, flags, w, text);
	struct stat st;

	CHECK_EQ(got, code);
	if (!strstr(text, says))
		fprintf(stderr, "%s\n", text);
	CHECK(strstr(text, says));
	CHECK_EQ(fstat(fd, &st), 0);
	if (st.st_size >= 64 && code) { /* and it is what it was */
		CHECK_EQ(pread(fd, before, 64, 0), 64);
		try(fd, flags, w, text);
		CHECK_EQ(pread(fd, after, 64, 0), 64);
		CHECK(!memcmp(before, after, 64));
	}
	close(fd);
}

static int patched_file(const struct world *w, const void *field, const void *data, size_t bytes)
{
	int fd = copied_file(w);
	off_t at = (const char *)field - (const char *)w->e->arena;

	CHECK_EQ(pwrite(fd, data, bytes, at), bytes);
	return fd;
}

#define PATCHED(w, field, value)                                                                   \
	patched_file(w, &(field), &(__typeof__(field)){value}, sizeof(field))

WORLD_TEST(each_damage_is_told, world_mapped(0))
{
	struct iswi_arena_header *h = w->e->arena;
	static char zeros[4096];
	int fd;

	put(w, 1, 1, 10);
	expect(copied_file(w), 0, w, 0, "");
	expect(new_file(), 0, w, -ENODATA, "empty");
	expect(patched_file(w, h, zeros, sizeof(zeros)), 0, w, -ENODATA, "zeros");
	expect(PATCHED(w, h->magic, 5), 0, w, -EBADMSG, "no state file");
	expect(PATCHED(w, h->version, 77), 0, w, -EPROTONOSUPPORT, "version 77");
	expect(PATCHED(w, h->size_bytes, h->size_bytes ^ 1ull << 20), 0, w, -EBADMSG, "checksum");
	expect(PATCHED(w, h->header_crc, h->header_crc ^ 1), 0, w, -EBADMSG, "checksum");
	expect(PATCHED(w, h->phase, ISWI_ARENA_UNFINISHED), 0, w, -ENODATA, "never finished");
	expect(PATCHED(w, w->e->slots[3].page, PAGES), 0, w, -EBADMSG, "staging buffer 3");
	expect(PATCHED(w, w->e->slabs[2].places[1].word, 4), 0, w, -EBADMSG, "slab 2");
	expect(PATCHED(w, w->e->slabs[0].places[0].remote, 99), 0, w, -EBADMSG, "donor 99");
	expect(PATCHED(w, w->e->slabs[1].current, 2), 0, w, -EBADMSG, "slab 1");
	expect(copied_file(w), ISW_ENGINE_NO_BACKUP, w, -EINVAL, "another device");
	fd = copied_file(w);
	CHECK_EQ(ftruncate(fd, 100), 0);
	expect(fd, 0, w, -EBADMSG, "cut short to 100");
	fd = copied_file(w);
	CHECK_EQ(ftruncate(fd, (off_t)w->e->arena_bytes - 1), 0);
	expect(fd, 0, w, -EBADMSG, "cut short");
}

/* As the one before, with a checksum that fits. */
WORLD_TEST(another_boot_or_device_is_told, world_new(0))
{
	struct iswi_arena_header *h = w->e->arena;
	const struct {
		size_t at;
		int code;
		const char *says;
	} fields[] = {
		{offsetof(struct iswi_arena_header, boot_id), -ESTALE, "booted"},
		{offsetof(struct iswi_arena_header, size_bytes), -EINVAL, "bytes of device"},
		{offsetof(struct iswi_arena_header, slab_bytes), -EINVAL, "bytes a slab"},
		{offsetof(struct iswi_arena_header, staging_pages), -EINVAL, "staging buffers"},
		{offsetof(struct iswi_arena_header, seals_offset), -EPROTONOSUPPORT,
		 "another layout"},
	};

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(fields); i++) {
		struct iswi_arena_header other;

		memcpy(&other, h, sizeof(other));
		((unsigned char *)&other)[fields[i].at] ^= 1;
		other.header_crc = 0;
		other.header_crc = iswi_crc32c(&other, offsetof(struct iswi_arena_header, phase));
		expect(patched_file(w, h, &other, sizeof(other)), 0, w, fields[i].code,
		       fields[i].says);
	}
}

TEST(half_loaded_tables_are_not_taken_over)
{
	int fd = new_file();
	struct world *w = world_kept(0, fd);
	struct isw_state_info info;

	CHECK_EQ(isw_state_read(fd, &info, NULL), 0);
	CHECK(info.ready && info.size_bytes == PAGES * ISW_PAGE_BYTES);
	CHECK(isw_engine_load_tables(w->e, "/nowhere", NULL) < 0);
	CHECK_EQ(isw_state_read(fd, &info, NULL), 0);
	CHECK(info.ready);
	world_end(w);
	close(fd);
}

/* ------------------------------------------------------------------------ ownership */

static void is_refused(int fd, int code, const char *says)
{
	struct isw_engine_config config = world_config(0);
	struct isw_error error = {0};
	isw_engine *e = NULL;

	config.state_fd = fd;
	CHECK_EQ(isw_sim_create(&config, &e, &error), code);
	CHECK(strstr(error.text, says));
}

TEST(a_state_file_has_one_owner)
{
	int fd = new_file();
	struct world *w = world_kept(0, fd);

	write_settled(w, 1, 1, 10);
	is_refused(fd, -EWOULDBLOCK, "alive");
	CHECK_EQ(read_settled(w, 1), 10); /* nothing of it was touched */
	world_end(w);
	world_end(world_kept(0, fd));
	close(fd);
}

TEST(a_standby_touches_nothing)
{
	int fd = new_file();
	struct world *w = world_kept(0, fd), *s = world_standby(0, fd);
	struct isw_remote_config remote = {.host = "127.0.0.1", .port = 1, .queues = 1};
	uint32_t number;
	void *before = malloc(w->e->arena_bytes);

	put(w, 1, 1, 10);
	memcpy(before, w->e->arena, w->e->arena_bytes);
	CHECK(isw_remote_connect(s->e, &remote, &number, NULL) < 0);
	CHECK(isw_remote_record_set(s->e, 0, "x", 1) < 0);
	CHECK_EQ(isw_slab_map(s->e, 0, 0, 0, 1), -EBUSY);
	CHECK(isw_engine_load_tables(s->e, "/nowhere", NULL) < 0);
	isw_engine_destroy(s->e);
	CHECK(!memcmp(before, w->e->arena, w->e->arena_bytes));
	free(before);
	free(s);
	world_end(w);
	close(fd);
}

/* A signal at the first page would be the end of whoever swaps there. */
TEST(a_full_file_system_is_an_error_at_create)
{
	char directory[] = "/tmp/isw-state-XXXXXX", path[64];
	struct stat st;
	int fd;

	CHECK(mkdtemp(directory));
	if (mount("none", directory, "tmpfs", 0, "size=64k")) {
		rmdir(directory);
		return; /* not root: the other checks stand */
	}
	snprintf(path, sizeof(path), "%s/state", directory);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	CHECK(fd >= 0);
	is_refused(fd, -ENOSPC, "smaller device or less staging");
	CHECK_EQ(fstat(fd, &st), 0);
	CHECK_EQ(st.st_size, 0);
	close(fd);
	CHECK_EQ(umount(directory), 0);
	rmdir(directory);
}

TEST(a_state_file_is_a_regular_file)
{
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);

	is_refused(fd, -EINVAL, "regular");
	close(fd);
}
