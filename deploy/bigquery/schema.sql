CREATE TABLE IF NOT EXISTS `project.dataset.flights` (
  `release_id` STRING NOT NULL,
  `window_start` TIMESTAMP,
  `window_end` TIMESTAMP,
  `trigger` INT64,
  `trigger_time` TIMESTAMP,
  `origin` STRING,
  `carrier` STRING,
  `flights` FLOAT64,
  `flights_sd` FLOAT64,
  `mean_delay` FLOAT64,
  `mean_delay_sd` FLOAT64,
  `plan_hash` STRING,
  `run_id` STRING,
  PRIMARY KEY (`release_id`) NOT ENFORCED
) CLUSTER BY `release_id`;
CREATE TABLE IF NOT EXISTS `project.dataset.flights_seals` (
  `name` STRING NOT NULL,
  `run_id` STRING,
  `value` STRING,
  PRIMARY KEY (`name`) NOT ENFORCED
) CLUSTER BY `name`;
