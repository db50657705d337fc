// SPDX-License-Identifier: Apache-2.0
/* A store in a directory, and the one that comes after it: what is served again, and what is not.
 */
#define _GNU_SOURCE 1
#include <glob.h>
#include <string.h>
#include <unistd.h>

#include "store_directory.h"

#define SLAB_BYTES 65536u
#define SLABS      3u

static void open_store(uint32_t slabs)
{
	CHECK_EQ(try_open_store(SLAB_BYTES, slabs, &store, NULL), 0);
	CHECK_EQ(isw_store_listen(store, "127.0.0.1", 0, &port, NULL), 0);
}

/* The one file whose name has that in it. */
static void find(const char *part, char *path_out, size_t bytes)
{
	char pattern[512];
	glob_t found;

	snprintf(pattern, sizeof(pattern), "%s/*%s*", directory, part);
	CHECK_EQ(glob(pattern, 0, NULL, &found), 0);
	CHECK_EQ(found.gl_pathc, 1);
	snprintf(path_out, bytes, "%s", found.gl_pathv[0]);
	globfree(&found);
}

static void fill(const char *ticket, uint32_t slot, int value)
{
	int fd = open_export(port, ticket);

	fill_bytes(fd, (uint64_t)slot * SLAB_BYTES, value, SLAB_BYTES);
	close(fd);
}

static void check_filled(const char *ticket, uint32_t slot, int value)
{
	int fd = open_export(port, ticket);

	check_bytes(fd, (uint64_t)slot * SLAB_BYTES, value, SLAB_BYTES);
	close(fd);
}

/* A full pool, and a lease of it. */
static struct leased begin(void)
{
	open_store(SLABS);
	while (isw_store_preallocate(store, NULL) == 0)
		;
	return lease_slots(4);
}

/* By the next daemon, which knows of the lease. */
static void open_again(uint64_t lease, uint32_t slabs)
{
	open_store(slabs);
	CHECK_EQ(isw_store_lease_restore(store, lease, 4, 5), 0);
	isw_store_restored(store);
}

static void end(void)
{
	tear_down();
	empty_directory();
}

static void check_note(const char *part)
{
	struct isw_error note;

	CHECK_EQ(isw_store_note(store, 0, &note), 0);
	check_says(note.text, part);
}

/* A lease comes back with its slabs where they were, but to its device alone. */
TEST(test_same_lease_again)
{
	struct leased leased = begin();
	struct isw_slot_info info;
	char ticket[ISW_TICKET_TEXT_BYTES];
	struct mapped one, two;
	int fd;

	isw_store_restored(store);
	one = map_slab(leased.lease);
	CHECK_EQ(isw_store_map(store, leased.lease, 77, &two.slot, &two.generation), 0);
	fill(leased.ticket, one.slot, 1);
	fill(leased.ticket, two.slot, 2);
	CHECK_EQ(unmap_slab(leased.lease, one, 1000), 0);
	tear_down();

	open_store(SLABS);
	CHECK_EQ(store_stats().slabs_free + store_stats().slabs_dirty, SLABS);
	CHECK_EQ(isw_store_lease_restore(store, leased.lease, 4, 5), 0);
	CHECK_EQ(isw_store_lease_restore(store, leased.lease, 4, 5), -EEXIST);
	CHECK_EQ(isw_store_lease_restore(store, 1u << 30, 4, 5), -EINVAL);
	isw_store_restored(store);
	CHECK_EQ(store_stats().slabs_mapped, 1);
	CHECK_EQ(store_stats().slabs_dirty, 1);
	CHECK_EQ(store_stats().slabs_free, 1);
	CHECK_EQ(isw_store_lease_slot(store, leased.lease, 0, &info), 0);
	CHECK_EQ(info.slot, two.slot);
	CHECK_EQ(info.generation, two.generation);
	CHECK_EQ(info.tag, 77);
	CHECK_EQ(isw_store_lease_slot(store, leased.lease, info.slot + 1, &info), -ENOENT);
	CHECK_EQ(lease_stats(leased.lease).epoch, 5);
	/* Tickets are not kept. */
	fd = dial(port);
	CHECK(try_open(fd, leased.ticket) != 0);
	close(fd);
	CHECK_EQ(give_ticket(store, leased.lease, ticket), -EBUSY);
	CHECK_EQ(lease_renew(store, leased.lease, 1000, ticket), 0);
	CHECK_EQ(lease_stats(leased.lease).epoch, 6);
	check_filled(ticket, two.slot, 2);
	/* A new slab is another generation, and zeroed. */
	one = map_slab(leased.lease);
	CHECK(one.generation > two.generation);
	check_filled(ticket, one.slot, 0);
	CHECK(lease_slots(1).lease > leased.lease);
	while (isw_store_pin(store) == 0)
		;
	end();
}

/* Nobody has named the lease: its bytes are nobody's. */
TEST(test_lease_that_nobody_names)
{
	struct leased leased = begin(), other;

	for (uint32_t i = 0; i < SLABS; i++)
		fill(leased.ticket, map_slab(leased.lease).slot, 9);
	tear_down();
	open_store(SLABS);
	isw_store_restored(store);
	CHECK_EQ(store_stats().slabs_dirty, SLABS);
	scrub_all();
	other = lease_slots(4);
	for (uint32_t i = 0; i < SLABS; i++)
		check_filled(other.ticket, map_slab(other.lease).slot, 0);
	end();
}

/* One directory, one store: even a second one of the same process is refused. */
TEST(test_directory_in_use)
{
	isw_store *second;
	struct isw_error error;

	open_store(SLABS);
	CHECK_EQ(try_open_store(SLAB_BYTES, SLABS, &second, &error), -EBUSY);
	CHECK(strstr(error.text, directory) != NULL);
	tear_down();
	open_store(SLABS);
	end();
}

/* A pool that was made smaller gives back what nobody has, and keeps what is lent. */
TEST(test_smaller_pool)
{
	struct leased leased = begin();

	map_slab(leased.lease);
	map_slab(leased.lease);
	tear_down();
	open_again(leased.lease, 1);
	CHECK_EQ(store_stats().slabs_mapped, 2);
	CHECK_EQ(store_stats().slabs_free, 0);
	CHECK_EQ(isw_store_preallocate(store, NULL), -ENOSPC);
	end();
}

/* What is done to the file of a lent slab while no daemon runs, and what is said about it. */
struct bad_file {
	const char *why;
	uint32_t slabs_left;
	/* One of these. */
	void (*spoil)(const char *path);
	const char *name;
	off_t bytes;
};

static void with_bad_file(const struct bad_file *bad)
{
	struct isw_slot_info info;
	struct leased leased = begin();
	char path[512], other[512];

	map_slab(leased.lease);
	tear_down();
	find(".mapped.", path, sizeof(path));
	if (bad->spoil != NULL) {
		bad->spoil(path);
	} else if (bad->name != NULL) {
		snprintf(other, sizeof(other), "%s/%s", directory, bad->name);
		CHECK_EQ(rename(path, other), 0);
	} else {
		CHECK_EQ(truncate(path, bad->bytes), 0);
	}
	open_store(SLABS);
	check_note(bad->why);
	/* Where everything goes, no number of before counts. */
	CHECK_EQ(isw_store_lease_restore(store, leased.lease, 4, 1), bad->slabs_left ? 0 : -EINVAL);
	isw_store_restored(store);
	CHECK_EQ(isw_store_lease_slot(store, leased.lease, 0, &info), -ENOENT);
	CHECK_EQ(store_stats().slabs_mapped, 0);
	CHECK_EQ(store_stats().slabs_free + store_stats().slabs_dirty, bad->slabs_left);
	end();
}

static void make_hole(const char *path)
{
	CHECK_EQ(truncate(path, 4096), 0);
	CHECK_EQ(truncate(path, SLAB_BYTES), 0);
}

static void make_link(const char *path)
{
	char other[512];

	snprintf(other, sizeof(other), "%s/slab.1000.free", directory);
	unlink(other);
	CHECK_EQ(rename(path, other), 0);
	CHECK_EQ(symlink("/dev/zero", path), 0);
}

static void give_away(const char *path)
{
	if (chown(path, 65534, 65534) !=
	    0) /* not root: it is refused all the same, see the caller */
		CHECK_EQ(truncate(path, SLAB_BYTES - 4096), 0);
}

static void no_counter(const char *path)
{
	char counter[512];

	(void)path;
	find("next.", counter, sizeof(counter));
	CHECK_EQ(unlink(counter), 0);
}

static void second_counter(const char *path)
{
	int fd;
	char other[512];

	(void)path;
	snprintf(other, sizeof(other), "%s/next.77", directory);
	fd = open(other, O_CREAT | O_WRONLY, 0600);
	CHECK(fd >= 0);
	close(fd);
}

TEST(test_bad_files)
{
	const struct bad_file files[] = {
		{"size", SLABS - 1, .bytes = SLAB_BYTES - 4096},
		{"size", SLABS - 1, .bytes = 2 * SLAB_BYTES},
		{"missing", SLABS - 1, .spoil = make_hole},
		{"opened", SLABS, .spoil = make_link},
		{geteuid() == 0 ? "user" : "size", SLABS - 1, .spoil = give_away},
		{"name", SLABS - 1, .name = "slab.7.mapped.1.0.5"},
		{"name", SLABS - 1, .name = "slab.1.mapped.01.0.5.0"},
		{"number", SLABS - 1, .name = "slab.1.mapped.1.0.99999.0"},
		{"counter", 0, .spoil = no_counter},
		{"counter", 0, .spoil = second_counter},
	};

	for (unsigned i = 0; i < sizeof(files) / sizeof(files[0]); i++)
		with_bad_file(&files[i]);
}

/* Two files that claim one slot: neither is served. */
TEST(test_two_in_one_slot)
{
	struct isw_slot_info info;
	struct leased leased = begin();
	struct mapped mapped;
	char path[512], other[512];

	mapped = map_slab(leased.lease);
	map_slab(leased.lease);
	tear_down();
	snprintf(path, sizeof(path), ".mapped.%llu.%u.", (unsigned long long)leased.lease,
		 mapped.slot + 1);
	find(path, path, sizeof(path));
	snprintf(other, sizeof(other), "%s/slab.900.mapped.%llu.%u.901.0", directory,
		 (unsigned long long)leased.lease, mapped.slot);
	CHECK_EQ(rename(path, other), 0);
	open_again(leased.lease, SLABS);
	CHECK_EQ(isw_store_lease_slot(store, leased.lease, 0, &info), -ENOENT);
	CHECK_EQ(store_stats().slabs_dirty, 2);
	end();
}

/* Something that cannot even be removed is a mistake for somebody to look at. */
TEST(test_what_cannot_be_removed)
{
	struct isw_error error;
	char path[512];

	snprintf(path, sizeof(path), "%s/somebody", directory);
	CHECK_EQ(mkdir(path, 0700), 0);
	CHECK(try_open_store(SLAB_BYTES, SLABS, &store, &error) < 0);
	CHECK(strstr(error.text, "somebody") != NULL);
	empty_directory();
	open_store(SLABS);
	end();
}

/* Its files go under the daemon: it serves on, and nothing survives it. */
TEST(test_files_removed_under_it)
{
	struct leased leased = begin();
	struct mapped mapped;

	mapped = map_slab(leased.lease);
	fill(leased.ticket, mapped.slot, 3);
	empty_directory();
	check_filled(leased.ticket, mapped.slot, 3);
	CHECK_EQ(unmap_slab(leased.lease, mapped, 1000), 0);
	CHECK_EQ(isw_store_scrub(store), 0);
	mapped = map_slab(leased.lease);
	check_filled(leased.ticket, mapped.slot, 0);
	CHECK_EQ(isw_store_lease_destroy(store, leased.lease), 0);
	while (isw_store_release_free(store) == 0)
		;
	CHECK_EQ(store_stats().slabs_free, 0);
	tear_down();
	open_store(SLABS);
	CHECK_EQ(store_stats().slabs_free, 0);
	end();
}

TEST(test_no_directory)
{
	struct isw_store_config config = config_of(SLAB_BYTES, SLABS);
	struct isw_error error;
	isw_store *store;

	config.slab_dir = "/nonexistent/slabs";
	CHECK_EQ(isw_store_create(&config, &store, &error), -ENOENT);
	CHECK(strstr(error.text, "/nonexistent/slabs") != NULL);
}

int main(void)
{
	directory_make();
	run_tests();
	return rmdir(directory);
}
